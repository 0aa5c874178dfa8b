// The thread team of one step: barriers and work stealing. Knows nothing of the work.
#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>
#include <vector>

namespace quire {

class Team {
 public:
  explicit Team(int size) : size_(size), ticket_(size), shares_((size_t)size) {}

  int size() const { return size_; }

  // Waits for all threads of the team. Two barriers of a step are microseconds apart, so a thread
  // spins. If it waits longer, it yields its core: a thread that has not arrived may need it.
  void barrier() {
    const int64_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      ticket_.store(size_, std::memory_order_relaxed);
      // Every thread starts with its own share, so share 0 shows whether any work was taken.
      if (shares_[0].taken.load(std::memory_order_relaxed) > 0)
        for (ShareCounter& share : shares_) share.taken.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; spins++) {
      if (spins < MAX_SPINS)
        pause();
      else
        sched_yield();
    }
  }

  // The next work item that no thread has taken since the last barrier. Each thread starts with the
  // item of its own index without calling this, so it knows its first item before the barrier.
  int64_t take() { return ticket_.fetch_add(1, std::memory_order_relaxed); }

  // The next item of `share`, which has `count` items, that no thread has taken since the last
  // barrier; or NONE. Each thread takes the items of a share in ascending order: RowArgmax relies
  // on that to keep the first of equal values.
  int64_t take_from(int share, int64_t count) {
    const int64_t item = shares_[(size_t)share].taken.fetch_add(1, std::memory_order_relaxed);
    return item < count ? item : NONE;
  }

  static constexpr int64_t NONE = -1;

 private:
  static constexpr int MAX_SPINS = 4000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  struct alignas(64) ShareCounter {
    std::atomic<int64_t> taken{0};
  };

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> generation_{0};
  alignas(64) std::atomic<int64_t> ticket_;
  std::vector<ShareCounter> shares_;
};

// Work stealing, one thread's part: it takes the items of its own share, then what is left of the
// other threads' shares. Calls body(share, item, next item of the same share or NONE); a share has
// count(share) items.
template <class Count, class Body>
void run_with_stealing(Team& team, int member, const Count& count, const Body& body) {
  for (int turn = 0; turn < team.size(); turn++) {
    const int share = (member + turn) % team.size();
    const int64_t total = count(share);
    for (int64_t i = team.take_from(share, total), next; i != Team::NONE; i = next) {
      next = team.take_from(share, total);
      body(share, i, next);
    }
  }
}

// The items first .. last-1; or one thread's equal share of `total` items, in multiples of `grain`.
struct Share {
  int64_t first, last;

  Share(int64_t first, int64_t last) : first(first), last(last) {}
  Share(int64_t total, int member, int size, int64_t grain = 1) {
    const int64_t units = (total + grain - 1) / grain;
    first = units * member / size * grain;
    last = units * (member + 1) / size * grain;
    if (last > total) last = total;
    if (first > total) first = total;
  }
};

}  // namespace quire
