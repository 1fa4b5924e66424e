/* What test_cuda_library.py calls of native/cuda_choice.c, without a library around it. */
#include "cuda_choice.c"

#define EXPORT __attribute__((visibility("default")))

static char message[2048];

EXPORT void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *text) {
  snprintf(message, sizeof message, "%s: %s", kind, text);
}

EXPORT int fit(int major, int minor, int suffix, int is_ptx, int device_major, int device_minor) {
  BsArch code = {(uint8_t)major, (uint8_t)minor, (char)suffix, (uint8_t)is_ptx};
  return blockscale_fit(code, device_major, device_minor);
}

/* The name of the entry that a device gets, or the error. */
EXPORT const char *choose(int count, const char *const *names, const int *numbers, int major, int minor) {
  BsEntry entries[16];
  for (int i = 0; i < count; ++i) {
    BsArch made_for = {(uint8_t)numbers[4 * i], (uint8_t)numbers[4 * i + 1], (char)numbers[4 * i + 2],
                       (uint8_t)numbers[4 * i + 3]};
    entries[i] = (BsEntry){names[i], made_for, NULL};
  }
  BsFunction function = {"f", NULL, entries, 0, count};
  BsDevice device = {NULL, 1, major, minor, 4, "Test GPU"};
  const BsEntry *found = blockscale_choose(&function, &device);
  return found != NULL ? found->arch : message;
}
