// The C interface: creates, steps and destroys decoders of both element types. Computes nothing.
#include "decoder.h"

#include <sys/mman.h>

#include "decoder_step.h"

int64_t quire_abi(void) { return 15; }

void quire_advise_huge_pages(void* memory, int64_t size) {
  const uintptr_t huge = 1 << 21, first = ((uintptr_t)memory + huge - 1) / huge * huge;
  const uintptr_t last = ((uintptr_t)memory + (uintptr_t)size) / huge * huge;
  // Only advice: if the system does not follow it, the step is slower.
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
}

void* quire_create(const QuireModel* model) try {
  using namespace quire;
  if (model->is_bfloat16) return static_cast<AnyDecoder*>(new Decoder<BFloat16>(*model));
  return static_cast<AnyDecoder*>(new Decoder<Float32>(*model));
} catch (const std::bad_alloc&) {
  return nullptr;
}

void quire_destroy(void* decoder) { delete static_cast<quire::AnyDecoder*>(decoder); }

int64_t quire_step(void* decoder, const QuireStep* step) try {
  static_cast<quire::AnyDecoder*>(decoder)->step(*step);
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
