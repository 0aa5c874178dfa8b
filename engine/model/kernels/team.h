// The threads of one step: they enter together, meet at barriers, and leave together. Knows no work.
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

  // Waits for everyone. Between two barriers of a step are microseconds, so waiting is spinning;
  // but whoever waits longer gives the core away: the one waited for may need it.
  void barrier() {
    const int64_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      ticket_.store(size_, std::memory_order_relaxed);
      // Whoever takes of shares takes of its own, so the first one shows whether anybody did.
      if (shares_[0].taken.load(std::memory_order_relaxed) > 0)
        for (Taken& share : shares_) share.taken.store(0, std::memory_order_relaxed);
      generation_.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; spins++) {
      if (spins < PATIENCE)
        pause();
      else
        sched_yield();
    }
  }

  // The next piece of work nobody has taken since the last barrier. Everybody begins with the piece
  // of their own number without asking, and so can be sure of it before the barrier.
  int64_t take() { return ticket_.fetch_add(1, std::memory_order_relaxed); }

  // The next piece of somebody's share of `count` pieces that nobody has taken since the last
  // barrier, or NONE. Whoever takes of a share takes its pieces in ascending order: who keeps the
  // first of the largest relies on that.
  int64_t take_of(int share, int64_t count) {
    const int64_t piece = shares_[(size_t)share].taken.fetch_add(1, std::memory_order_relaxed);
    return piece < count ? piece : NONE;
  }

  static constexpr int64_t NONE = -1;

 private:
  static constexpr int PATIENCE = 4000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  struct alignas(64) Taken {
    std::atomic<int64_t> taken{0};
  };

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int64_t> generation_{0};
  alignas(64) std::atomic<int64_t> ticket_;
  std::vector<Taken> shares_;
};

// One thread's part of work that is shared out: its own share, and then those of others that are
// held up. body(share, piece, the share's next piece or NONE), for each of count(share) pieces.
template <class Count, class Body>
void take_shares(Team& team, int member, const Count& count, const Body& body) {
  for (int turn = 0; turn < team.size(); turn++) {
    const int share = (member + turn) % team.size();
    const int64_t total = count(share);
    for (int64_t i = team.take_of(share, total), next; i != Team::NONE; i = next) {
      next = team.take_of(share, total);
      body(share, i, next);
    }
  }
}

// Pieces first .. last-1; as a rule one thread's equal share of `total`, in units of `grain`.
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
