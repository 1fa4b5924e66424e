/* Drives blockscale/runtime/native/runtime.c as TVM's object code does; prints the first broken promise. */
#include "../../blockscale/runtime/native/runtime.c"

#include <omp.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                     \
  do {                                                       \
    if (!(condition)) {                                      \
      printf("line %d: %s\n", __LINE__, #condition);         \
      exit(1);                                               \
    }                                                        \
  } while (0)

/* libtvm_ffi's error functions: one pending error per thread, counted. */
static _Thread_local char text[256];
static _Thread_local char *pending;
static atomic_int live_errors;

void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  (void)kind;
  if (pending == NULL) atomic_fetch_add(&live_errors, 1);
  pending = strncpy(text, message, sizeof text - 1);
}
void TVMFFIErrorMoveFromRaised(void **error) {
  *error = pending;
  pending = NULL;
}
void TVMFFIErrorSetRaised(void *error) {
  atomic_fetch_add(&live_errors, 1);
  pending = error;
}
int TVMFFIObjectDecRef(void *object) {
  (void)object;
  atomic_fetch_sub(&live_errors, 1);
  return 0;
}

int TVMFFIFunctionGetGlobal(const Bytes *name, void **function) {
  (void)name;
  *function = NULL;
  return 0;
}

enum { TASKS = 64 };
static atomic_int runs[TASKS];
static int tasks_seen;

static void expect_each_once(int tasks) {
  CHECK(tasks_seen == tasks);
  for (int i = 0; i < TASKS; ++i) CHECK(atomic_exchange(&runs[i], 0) == (i < tasks));
}

static int count(int task, TVMParallelGroupEnv *env, void *closure) {
  CHECK(closure == (void *)&runs);
  tasks_seen = env->num_task;
  atomic_fetch_add(&runs[task], 1);
  return 0;
}

static int count_nested(int task, TVMParallelGroupEnv *env, void *closure) {
  (void)env, (void)closure;
  if (task == 0) CHECK(__TVMBackendParallelLaunch(count, &runs, 0) == 0);
  return 0;
}

/* Every task writes its number, all wait, then every task reads all numbers; a hundred times. */
static atomic_int board[TASKS];
static int meet(int task, TVMParallelGroupEnv *env, void *closure) {
  (void)closure;
  for (int round = 1; round <= 100; ++round) {
    atomic_store(&board[task], round);
    if (__TVMBackendParallelBarrier(task, env) != 0) return -1;
    for (int i = 0; i < env->num_task; ++i) CHECK(atomic_load(&board[i]) == round);
    if (__TVMBackendParallelBarrier(task, env) != 0) return -1;
  }
  return 0;
}

static int fail_some(int task, TVMParallelGroupEnv *env, void *closure) {
  (void)closure;
  if (task % 2 == 1 || env->num_task == 1) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "odd");
    return -1;
  }
  return __TVMBackendParallelBarrier(task, env); /* does not wait for the failed for ever */
}

static void check_launches(void) {
  for (int threads = 1; threads <= 4; ++threads) {
    omp_set_num_threads(threads);
    CHECK(__TVMBackendParallelLaunch(count, &runs, 0) == 0);
    expect_each_once(threads);
    for (int tasks = 1; tasks <= 7; ++tasks) {
      CHECK(__TVMBackendParallelLaunch(count, &runs, tasks) == 0);
      expect_each_once(tasks);
    }
    CHECK(__TVMBackendParallelLaunch(count_nested, NULL, 0) == 0);
    expect_each_once(1);
    CHECK(__TVMBackendParallelLaunch(meet, NULL, 0) == 0);
    CHECK(__TVMBackendParallelLaunch(meet, NULL, threads) == 0);
    CHECK(__TVMBackendParallelLaunch(meet, NULL, threads + 1) == -1); /* an error, no deadlock */
    CHECK(strstr(pending, "fewer threads than tasks") != NULL);
    pending = NULL;
    atomic_store(&live_errors, 0);
    CHECK(__TVMBackendParallelLaunch(fail_some, NULL, 0) == -1);
    CHECK(strcmp(pending, "odd") == 0);
    CHECK(atomic_load(&live_errors) == 1);
    pending = NULL;
    atomic_store(&live_errors, 0);
  }
}

static void *alloc(uint64_t bytes) { return __TVMBackendAllocWorkspace(1, 0, bytes, 2, 32); }
static void release(void *data) { CHECK(__TVMBackendFreeWorkspace(1, 0, data) == 0); }

static void *check_workspaces(void *unused) {
  (void)unused;
  void *all[2 * SLOTS];
  const uint64_t sizes[] = {0, 1, 64, 4095, 4096, 100000, 3 << 20};
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 2 * SLOTS; ++i) { /* more at once than there are slots */
      uint64_t bytes = sizes[(i + round) % 7];
      all[i] = alloc(bytes);
      CHECK(all[i] != NULL && (uintptr_t)all[i] % (bytes < 4096 ? 64 : 4096) == 0);
      memset(all[i], i, bytes);
      for (int j = 0; j < i; ++j) CHECK(all[j] != all[i]);
    }
    for (int i = 0; i < 2 * SLOTS; ++i) release(all[round % 2 ? i : 2 * SLOTS - 1 - i]);
  }
  void *first = alloc(5000);
  release(first);
  void *second = alloc(4500);
  CHECK(second == first); /* reused */
  release(second);
  void *huge = alloc(KEPT_BYTES + 1); /* not kept */
  CHECK(huge != NULL);
  release(huge);
  CHECK(alloc(UINT64_MAX) == NULL && strstr(pending, "no memory") != NULL);
  CHECK(alloc(UINT64_MAX / 4) == NULL);
  pending = NULL;
  return NULL;
}

/* The threads of the process are not ours, and its first launch is in a child. */
static void check_fork(void) {
  omp_set_num_threads(2);
#pragma omp parallel
  CHECK(omp_get_num_threads() == 2);
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20);
    CHECK(__TVMBackendParallelLaunch(count, &runs, 0) == 0);
    expect_each_once(1);
    CHECK(__TVMBackendParallelLaunch(count, &runs, 3) == 0);
    expect_each_once(3);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
}

int main(void) {
  check_fork();
  check_launches();
  check_workspaces(NULL);
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) CHECK(pthread_create(&threads[i], NULL, check_workspaces, NULL) == 0);
  for (int i = 0; i < 4; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  puts("ok");
  return 0;
}
