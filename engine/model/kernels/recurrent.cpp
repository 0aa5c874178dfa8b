// The C functions of the recurrences: divides one call among threads. Computes nothing.
#include "recurrent.h"

#include <omp.h>

#include <optional>

#include "activated_convolution.h"
#include "recurrence.h"
#include "selection.h"
#include "workspace.h"

namespace {

// Multiplications that are worth another thread: it takes microseconds to wake one.
constexpr int64_t WORTH_A_THREAD = 1 << 16;

// What an exponential takes, in multiplications.
constexpr int64_t EXPONENTIAL = 10;

// Calls part(team, member, scratch) in as many threads as the work is worth, each with `size` floats
// of memory. Returns 1 if there is not enough memory; no part is called then.
template <class Part>
int64_t divide(int64_t work, int64_t num_threads, int64_t size, const Part& part) try {
  thread_local quire::Workspace workspace;
  const int64_t count = std::min(num_threads, 1 + work / WORTH_A_THREAD);
  float* scratch;
  workspace.add(&scratch, count * size);
  workspace.reserve(0);
  std::optional<quire::Team> team;
#pragma omp parallel num_threads((int)count)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    const int member = omp_get_thread_num();
    part(*team, member, scratch + member * size);
  }
  return 0;
} catch (const std::bad_alloc&) {
  return 1;
}

int64_t tokens_of(const QuireRows& rows) {
  int64_t sum = 0;
  for (int64_t row = 0; row < rows.num_rows; row++) sum += rows.query_lens[row];
  return sum;
}

}  // namespace

int64_t quire_convolve(const QuireRows* rows, const QuireConvolution* of, int64_t num_threads) {
  return divide(tokens_of(*rows) * of->channels * of->weights.num_taps, num_threads, 0,
                [&](quire::Team& team, int member, float*) {
                  quire::convolve(*rows, *of, team, member);
                });
}

int64_t quire_recur(const QuireRows* rows, const QuireRecurrence* of, int64_t num_threads) {
  return divide(tokens_of(*rows) * of->num_heads * of->key_dim * of->value_dim, num_threads,
                quire::RecurrenceScratch::size(of->key_dim),
                [&](quire::Team& team, int member, float* scratch) {
                  quire::recur(*rows, *of, team, member, scratch);
                });
}

int64_t quire_select(const QuireRows* rows, const QuireSelection* of, int64_t num_threads) {
  return divide(tokens_of(*rows) * of->channels * of->state_size * EXPONENTIAL, num_threads,
                of->state_size * quire::LANES,
                [&](quire::Team& team, int member, float* scratch) {
                  quire::select(*rows, *of, team, member, scratch);
                });
}
