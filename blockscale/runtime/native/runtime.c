/* What a compiled TVM kernel expects from its runtime, for one blockscale library.
 *
 * TVM's object code calls its runtime through the function pointers __TVMBackendParallelLaunch,
 * __TVMBackendParallelBarrier, __TVMBackendAllocWorkspace and __TVMBackendFreeWorkspace, which are
 * weak and null until libtvm_runtime fills them. That library is absent where we are deployed, so
 * they are defined here: strong, and hidden, so that neither a TVM that is loaded in the same
 * process nor a second blockscale library can redirect them.
 *
 * Threads: the OpenMP pool that the process already has. torch loads its libgomp for all to see,
 * so torch.set_num_threads() holds here too, and no second pool competes for the cores.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* From libtvm_ffi, which every process that loads us has loaded before. */
typedef struct {
  const char *data;
  size_t size;
} Bytes; /* TVMFFIByteArray */
extern int TVMFFIFunctionGetGlobal(const Bytes *name, void **function);
extern void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message);
extern void TVMFFIErrorMoveFromRaised(void **error);
extern void TVMFFIErrorSetRaised(void *error); /* takes a reference of its own */
extern int TVMFFIObjectDecRef(void *object);

/* How blockscale.base.manifest tells a truncated library of ours from a foreign one. */
HIDDEN __attribute__((used)) const char blockscale_marker[] = "blockscale library, format 1";

/* ---- Parallel launch ------------------------------------------------------------------------ */

typedef struct {
  void *sync_handle;
  int32_t num_task;
} TVMParallelGroupEnv;

typedef int (*Lambda)(int task_id, TVMParallelGroupEnv *env, void *closure);

typedef struct {
  Lambda lambda;
  void *closure;
  int num_task; /* 0: one for every thread of the team */
  atomic_int failed;
  _Atomic(void *) error; /* the first error that a task raised */
  atomic_int arrived;    /* at the current barrier */
  atomic_int rounds;     /* barriers completed */
} Launch;

static struct {
  void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
  int (*max_threads)(void);
  int (*num_threads)(void);
  int (*thread_num)(void);
  int (*in_parallel)(void);
} omp;

static pthread_once_t omp_once = PTHREAD_ONCE_INIT;
static int omp_found = 0;

/* The threads of libgomp do not survive fork(), and a launch from the child would wait for them for
 * ever, whoever started them: a kernel or torch. A process that was forked after it had loaded us
 * therefore runs serially; so does one that loads us after it was forked, of which
 * blockscale.runtime.library tells us by a function's name. */
static int forked = 0;

static void after_fork_in_child(void) { forked = 1; }

__attribute__((constructor)) static void watch_forks(void) {
  Bytes name = {"blockscale.forked", sizeof "blockscale.forked" - 1};
  void *told = NULL;
  if (TVMFFIFunctionGetGlobal(&name, &told) == 0 && told != NULL) {
    forked = 1;
    TVMFFIObjectDecRef(told);
  }
  pthread_atfork(NULL, NULL, after_fork_in_child);
}

static int find_openmp_in(void *handle) {
  omp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))dlsym(handle, "GOMP_parallel");
  omp.max_threads = (int (*)(void))dlsym(handle, "omp_get_max_threads");
  omp.num_threads = (int (*)(void))dlsym(handle, "omp_get_num_threads");
  omp.thread_num = (int (*)(void))dlsym(handle, "omp_get_thread_num");
  omp.in_parallel = (int (*)(void))dlsym(handle, "omp_in_parallel");
  return omp.parallel && omp.max_threads && omp.num_threads && omp.thread_num && omp.in_parallel;
}

static void find_openmp(void) {
  omp_found = find_openmp_in(RTLD_DEFAULT);
  if (!omp_found) {
    void *handle = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
    omp_found = handle != NULL && find_openmp_in(handle);
  }
}

/* An error lies in a variable of the thread that raised it: carry the first one to the launcher. */
static void keep_error(Launch *launch) {
  void *error = NULL;
  void *none = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error != NULL && !atomic_compare_exchange_strong(&launch->error, &none, error)) {
    TVMFFIObjectDecRef(error);
  }
  atomic_store(&launch->failed, 1);
}

static void run_team_member(void *data) {
  Launch *launch = data;
  int team = omp.num_threads();
  int tasks = launch->num_task > 0 ? launch->num_task : team;
  TVMParallelGroupEnv env = {team >= tasks ? launch : NULL, tasks};
  for (int task = omp.thread_num(); task < tasks; task += team) {
    if (launch->lambda(task, &env, launch->closure) != 0) keep_error(launch);
  }
}

static int run_serially(Lambda lambda, void *closure, int num_task) {
  TVMParallelGroupEnv env = {NULL, num_task > 0 ? num_task : 1};
  for (int task = 0; task < env.num_task; ++task) {
    int code = lambda(task, &env, closure);
    if (code != 0) return code;
  }
  return 0;
}

static int parallel_launch(Lambda lambda, void *closure, int num_task) {
  if (num_task == 1 || forked) return run_serially(lambda, closure, num_task);
  pthread_once(&omp_once, find_openmp);
  int workers = omp_found && !omp.in_parallel() ? omp.max_threads() : 1;
  if (num_task > 0 && workers > num_task) workers = num_task;
  if (workers <= 1) return run_serially(lambda, closure, num_task);

  Launch launch = {.lambda = lambda, .closure = closure, .num_task = num_task};
  omp.parallel(run_team_member, &launch, (unsigned)workers, 0);
  if (!atomic_load(&launch.failed)) return 0;
  void *error = atomic_load(&launch.error);
  if (error != NULL) {
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
  }
  return -1;
}

/* Waits until every task of the launch is here, or until one has failed. */
static int parallel_barrier(int task_id, TVMParallelGroupEnv *env) {
  (void)task_id;
  if (env->num_task == 1) return 0;
  Launch *launch = env->sync_handle;
  if (launch == NULL) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError",
                                 "blockscale: a kernel with a barrier got fewer threads than tasks; "
                                 "allow more threads or build it without a fixed number of tasks");
    return -1;
  }
  int round = atomic_load(&launch->rounds);
  if (atomic_fetch_add(&launch->arrived, 1) + 1 == env->num_task) {
    atomic_store(&launch->arrived, 0);
    atomic_fetch_add(&launch->rounds, 1);
    return 0;
  }
  while (atomic_load(&launch->rounds) == round) {
    if (atomic_load(&launch->failed)) return -1;
    sched_yield();
  }
  return 0;
}

/* ---- Workspaces ----------------------------------------------------------------------------- */

enum { SLOTS = 8, LINE_BYTES = 64, PAGE_BYTES = 4096 };
static const uint64_t KEPT_BYTES = 32u << 20; /* a bigger workspace goes back when it is freed */

typedef struct {
  void *data;
  uint64_t bytes;
  int used;
} Slot;

/* A thread's workspaces; a slot keeps its memory for the next call until the thread ends. */
typedef struct {
  Slot slots[SLOTS];
} Arena;

static pthread_once_t arena_once = PTHREAD_ONCE_INIT;
static pthread_key_t arena_key;
static int arena_key_valid = 0;

static void free_arena(void *data) {
  Arena *arena = data;
  for (int i = 0; i < SLOTS; ++i) free(arena->slots[i].data);
  free(arena);
}

static void create_arena_key(void) { arena_key_valid = pthread_key_create(&arena_key, free_arena) == 0; }

/* This thread's arena, or NULL: then every workspace is allocated for itself. */
static Arena *this_arena(void) {
  pthread_once(&arena_once, create_arena_key);
  if (!arena_key_valid) return NULL;
  Arena *arena = pthread_getspecific(arena_key);
  if (arena != NULL) return arena;
  arena = calloc(1, sizeof *arena);
  if (arena != NULL && pthread_setspecific(arena_key, arena) != 0) {
    free(arena);
    return NULL;
  }
  return arena;
}

/* The smallest free slot that holds `bytes`; else a free slot to be (re)filled; else NULL. */
static Slot *pick_slot(Arena *arena, uint64_t bytes) {
  Slot *fitting = NULL;
  Slot *other = NULL;
  for (Slot *slot = arena->slots; slot < arena->slots + SLOTS; ++slot) {
    if (slot->used) continue;
    if (slot->bytes >= bytes) {
      if (fitting == NULL || slot->bytes < fitting->bytes) fitting = slot;
    } else if (other == NULL || slot->bytes > other->bytes) {
      other = slot; /* growing a used slot beats filling an empty one */
    }
  }
  return fitting != NULL ? fitting : other;
}

static void *raise_out_of_memory(uint64_t bytes) {
  char message[128];
  snprintf(message, sizeof message, "blockscale: no memory for a kernel workspace of %llu bytes",
           (unsigned long long)bytes);
  TVMFFIErrorSetRaisedFromCStr("MemoryError", message);
  return NULL;
}

static void *alloc_workspace(int device_type, int device_id, uint64_t nbytes, int code, int bits) {
  (void)device_type, (void)device_id, (void)code, (void)bits;
  uint64_t align = nbytes < PAGE_BYTES ? LINE_BYTES : PAGE_BYTES;
  if (nbytes > (uint64_t)INT64_MAX - align) return raise_out_of_memory(nbytes);
  uint64_t bytes = nbytes == 0 ? align : (nbytes + align - 1) / align * align;

  Arena *arena = this_arena();
  Slot *slot = arena != NULL ? pick_slot(arena, bytes) : NULL;
  if (slot == NULL) {
    void *data = aligned_alloc(align, bytes);
    return data != NULL ? data : raise_out_of_memory(nbytes);
  }
  if (slot->bytes < bytes) {
    free(slot->data);
    slot->data = aligned_alloc(align, bytes);
    slot->bytes = slot->data != NULL ? bytes : 0;
    if (slot->data == NULL) return raise_out_of_memory(nbytes);
  }
  slot->used = 1;
  return slot->data;
}

static int free_workspace(int device_type, int device_id, void *data) {
  (void)device_type, (void)device_id;
  Arena *arena = this_arena();
  for (int i = 0; arena != NULL && i < SLOTS; ++i) {
    Slot *slot = &arena->slots[i];
    if (slot->data != data) continue;
    slot->used = 0;
    if (slot->bytes > KEPT_BYTES) {
      free(data);
      *slot = (Slot){NULL, 0, 0};
    }
    return 0;
  }
  free(data);
  return 0;
}

/* ---- The pointers that TVM's object code calls through -------------------------------------- */

HIDDEN int (*__TVMBackendParallelLaunch)(Lambda, void *, int) = parallel_launch;
HIDDEN int (*__TVMBackendParallelBarrier)(int, TVMParallelGroupEnv *) = parallel_barrier;
HIDDEN void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int) = alloc_workspace;
HIDDEN int (*__TVMBackendFreeWorkspace)(int, int, void *) = free_workspace;
