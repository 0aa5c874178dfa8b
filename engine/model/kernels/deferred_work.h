// Vector work that is deferred until the matrix unit (AMX) multiplies: the vector units are idle
// then.
#pragma once

#include <cstdint>

namespace quire {

// Steps first .. last-1 of `work`, which must outlive this object. Holds no step by default.
class DeferredWork {
 public:
  DeferredWork() {}
  template <class Work>
  DeferredWork(int64_t first, int64_t last, const Work& work)
      : next_(first), last_(last), work_(&work), step_(&step<Work>) {}

  // Runs the next `count` steps, or all that are left.
  void run(int64_t count) {
    for (; count > 0 && next_ < last_; count--) step_(work_, next_++);
  }
  void finish() { run(last_ - next_); }

 private:
  template <class Work>
  static void step(const void* work, int64_t number) {
    (*static_cast<const Work*>(work))(number);
  }

  int64_t next_ = 0, last_ = 0;
  const void* work_ = nullptr;
  void (*step_)(const void*, int64_t) = nullptr;
};

}  // namespace quire
