// The C functions of the recurrences: divides one call among threads. Computes nothing.
#include "recurrent.h"

#include <omp.h>

#include <optional>

#include "activated_convolution.h"
#include "recurrence.h"
#include "workspace.h"

namespace {

// Multiplications that are worth another thread: it takes microseconds to wake one.
constexpr int64_t WORTH_A_THREAD = 1 << 16;

// Calls part(team, member) in as many threads as the work is worth.
template <class Part>
void divide(int64_t work, int64_t num_threads, const Part& part) {
  std::optional<quire::Team> team;
  const int64_t size = std::min(num_threads, 1 + work / WORTH_A_THREAD);
#pragma omp parallel num_threads((int)size)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    part(*team, omp_get_thread_num());
  }
}

int64_t tokens_of(const QuireRows& rows) {
  int64_t sum = 0;
  for (int64_t row = 0; row < rows.num_rows; row++) sum += rows.query_lens[row];
  return sum;
}

}  // namespace

int64_t quire_convolve(const QuireRows* rows, const QuireConvolution* of, int64_t num_threads) {
  divide(tokens_of(*rows) * of->channels * of->weights.num_taps, num_threads,
         [&](quire::Team& team, int member) { quire::convolve(*rows, *of, team, member); });
  return 0;
}

int64_t quire_recur(const QuireRows* rows, const QuireRecurrence* of, int64_t num_threads) try {
  thread_local quire::Workspace workspace;
  const int64_t size = quire::RecurrenceScratch::size(of->key_dim);
  float* scratch;
  workspace.add(&scratch, num_threads * size);
  workspace.reserve(0);
  divide(tokens_of(*rows) * of->num_heads * of->key_dim * of->value_dim, num_threads,
         [&](quire::Team& team, int member) {
           quire::recur(*rows, *of, team, member, scratch + member * size);
         });
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}
