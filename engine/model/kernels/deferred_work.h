// Work for vectors while the matrix unit multiplies: the unit takes its time, and vectors are free.
#pragma once

#include <cstdint>

namespace quire {

// Steps first .. last-1 of some work, which outlives this. Nothing to begin with.
class Meanwhile {
 public:
  Meanwhile() {}
  template <class Work>
  Meanwhile(int64_t first, int64_t last, const Work& work)
      : next_(first), last_(last), work_(&work), step_(&step<Work>) {}

  void some(int64_t count) {
    for (; count > 0 && next_ < last_; count--) step_(work_, next_++);
  }
  void finish() { some(last_ - next_); }

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
