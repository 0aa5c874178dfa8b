// The functions of OpenMP that the kernels call, with threads that the sanitizer of threads can
// follow. OpenMP's own library orders memory by system calls that the sanitizer does not see, so
// that it would report everything that a region reads of what was written before.
#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <thread>
#include <vector>

namespace {

struct Region {
  int size;
  std::atomic<int> singles{0};  // How many blocks for a single thread have been entered.
  pthread_barrier_t barrier;
};

thread_local Region* region = nullptr;
thread_local int member = 0, singles_seen = 0;

}  // namespace

extern "C" {

void GOMP_parallel(void (*body)(void*), void* data, unsigned count, unsigned) {
  Region own{count > 0 ? (int)count : 1, {}, {}};
  pthread_barrier_init(&own.barrier, nullptr, (unsigned)own.size);
  const auto run = [&](int index) {
    region = &own;
    member = index;
    singles_seen = 0;
    body(data);
  };
  std::vector<std::thread> others;
  for (int index = 1; index < own.size; index++) others.emplace_back(run, index);
  run(0);
  for (std::thread& other : others) other.join();
  region = nullptr;
  pthread_barrier_destroy(&own.barrier);
}

bool GOMP_single_start() {
  int seen = singles_seen++;
  return region->singles.compare_exchange_strong(seen, seen + 1);
}

void GOMP_barrier() { pthread_barrier_wait(&region->barrier); }

int omp_get_num_threads() noexcept { return region != nullptr ? region->size : 1; }

int omp_get_thread_num() noexcept { return member; }
}
