/* Which of the code in a CUDA library a device runs, and how errors are raised. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cuda_library.h"

int blockscale_raise(const char *kind, const char *format, ...) {
  char message[1024];
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

int blockscale_fit(BsArch code, int major, int minor) {
  int same = code.major == major && code.minor == minor;
  int older = code.major < major || (code.major == major && code.minor <= minor);
  int fits, rank = 0;
  if (code.suffix == 'a') {
    fits = same;
    rank = 2;
  } else if (code.suffix == 'f') {
    fits = older && code.major == major;
    rank = 1;
  } else { /* PTX runs on all that follow, machine code within its major version */
    fits = older && (code.is_ptx || code.major == major);
  }
  return fits ? (code.is_ptx ? 0 : 1 << 18) | rank << 16 | code.major << 8 | code.minor : -1;
}

const BsEntry *blockscale_choose(const BsFunction *function, const BsDevice *device) {
  const BsEntry *best = NULL;
  int most = -1;
  for (const BsEntry *entry = function->entries; entry < function->entries + function->entry_count; ++entry) {
    int fit = blockscale_fit(entry->made_for, device->major, device->minor);
    if (fit > most) {
      most = fit;
      best = entry;
    }
  }
  if (best != NULL) return best;
  char held[256] = "";
  for (int i = 0; i < function->entry_count; ++i) {
    size_t used = strlen(held);
    snprintf(held + used, sizeof held - used, "%s%s%s", i > 0 ? ", " : "", function->entries[i].arch,
             function->entries[i].made_for.is_ptx ? " (PTX)" : "");
  }
  blockscale_raise("RuntimeError",
                   "%s: device %d (%s) has compute capability %d.%d, but the library holds code for %s; build it with "
                   "target sm_%d%d%s as well",
                   function->name, device->ordinal, device->name, device->major, device->minor, held,
                   device->major, device->minor, device->major >= 9 ? "a" : "");
  return NULL;
}
