// Divides a matrix product among the threads of a team. Knows no layer.
#pragma once

#include "decoder.h"
#include "multiply.h"
#include "panels.h"
#include "team.h"

namespace quire {

// From this many rows on, strips are scheduled dynamically. The product then takes long enough that
// one thread may be interrupted, and the other threads take over its work. Fewer rows are scheduled
// statically.
constexpr int64_t DYNAMIC_ROWS = 16;

// A linear layer and the layer that is multiplied after it. Barriers, norms or attention lie
// between the two: a thread that has finished its part prefetches the first strips of the next
// layer.
struct Product {
  QuireLinear linear;
  const Product* next = nullptr;

  int64_t num_strips() const { return (linear.outputs + LANES - 1) / LANES; }
  int64_t num_groups() const { return (num_strips() + TILE_STRIPS - 1) / TILE_STRIPS; }
  const uint32_t* packed() const { return (const uint32_t*)linear.packed; }
};

// The rows of which a product is computed. Digits are those of values before they are rounded, so
// rows for quantized weights keep their low parts; others keep them only with split precision.
template <class Row>
inline RoundedRows<Row> inputs_of(const Product& product, const RoundedRows<Row>& rows,
                                  bool split = false) {
  return rows.with_low(split || product.linear.num_parts > 0);
}

// The first `count` rows of the inputs of a product.
template <class T>
inline Rows<T> rows_of(const RoundedRows<typename T::Row>& from, int64_t count) {
  typedef const typename T::RowWord* Words;
  return {(Words)from.values, from.stride / T::PER_WORD, count, (Words)from.low};
}

// The work items of a dynamically scheduled product: each thread gets the same number of whole
// groups of TILE_STRIPS strips. Each group that remains is divided by rows into one item per
// thread.
class ProductItems {
 public:
  const int64_t count;

  ProductItems(int64_t groups, int64_t rows, int size)
      : count(groups / size * size + groups % size * size),
        num_whole_(groups / size * size),
        rows_(rows),
        size_(size) {}

  int64_t group(int64_t item) const {
    return item < num_whole_ ? item : num_whole_ + (item - num_whole_) / size_;
  }
  Share rows(int64_t item) const {
    if (item < num_whole_) return Share(rows_, 0, 1);
    return Share(rows_, (int)((item - num_whole_) % size_), size_);
  }

 private:
  const int64_t num_whole_, rows_;
  const int size_;
};

// The memory of the strips first .. last-1 of a product; of quantized weights, as far as they are
// in the part of the first.
template <class T>
inline PrefetchRange strips_of(const Product& product, int64_t first, int64_t last,
                               bool same_product = false) {
  const uint32_t* packed = product.packed();
  int64_t words = product.linear.inputs / T::PER_WORD * LANES, begin = 0;
  int64_t end = product.num_strips();
  if (product.linear.num_parts > 0) {
    const PanelPart part = part_of(product.linear, first);
    packed = (const uint32_t*)part.panels->packed;
    words = PanelShape(*part.panels, product.linear.inputs).all / PANEL_STRIPS /
            (int64_t)sizeof(uint32_t);
    begin = part.first;
    end = part.last;
  }
  const int64_t count = std::min(last, end) - first;
  return {packed + (first - begin) * words, count * words, false, same_product};
}

// Whether each thread multiplies its own rows by all strips. The same thread then computes the
// norms, activations and attention of these rows: cache lines last written by a core that does not
// share a cache arrive slowly. Since every thread reads all strips, it needs enough rows to hide
// the memory latency behind arithmetic.
template <class T>
inline bool threads_own_rows(int64_t rows, int size) {
  return Tiles<T>::OWN_ROWS > 0 && rows >= Tiles<T>::OWN_ROWS * size;
}

// The strips that a member of a team multiplies first.
template <class T>
inline PrefetchRange first_strips(const Product& product, int64_t rows, int member, int size) {
  int64_t first = Share(product.num_strips(), member, size, 2).first;
  if (threads_own_rows<T>(rows, size))
    first = 0;
  else if (rows >= DYNAMIC_ROWS)
    first = TILE_STRIPS * ProductItems(product.num_groups(), rows, size).group(member);
  return strips_of<T>(product, first, first + TILE_STRIPS);
}

// Rows times the strips first .. last-1 of a product, as multiply().
template <class T, class Epilogue>
void multiply_strips(const Product& product, const Rows<T>& rows, int64_t first, int64_t last,
                     const PrefetchRange& next, float* sums, const Epilogue& epilogue) {
  multiply<T>(rows, product.packed(), product.linear.inputs / T::PER_WORD, first, last, next, sums,
              epilogue);
}
template <class T, class Epilogue>
void multiply_strips(const Product& product, const DigitRows& rows, int64_t first, int64_t last,
                     const PrefetchRange& next, float* sums, const Epilogue& epilogue) {
  multiply_panels(rows, product.linear, first, last, next, sums, epilogue);
}

// One thread's part of rows times a product; epilogue(row, strip, values, count) as in multiply().
// `rows` are Rows<T>, or DigitRows for quantized weights.
template <class T, class Operand, class Epilogue>
void multiply_part(const Product& product, const Operand& rows, Team& team, int member, float* sums,
                   const Epilogue& epilogue) {
  const PrefetchRange next_product =
      first_strips<T>(*product.next, rows.count, member, team.size());
  const auto compute = [&](const Operand& rows, int64_t first, int64_t last,
                           const PrefetchRange& next) {
    multiply_strips<T>(product, rows, first, last, next, sums, epilogue);
  };
  const auto compute_group = [&](const Operand& rows, int64_t group, const PrefetchRange& next) {
    const int64_t first = group * TILE_STRIPS;
    compute(rows, first, std::min(first + TILE_STRIPS, product.num_strips()), next);
  };
  const auto strips_of_group = [&](int64_t group) {
    return strips_of<T>(product, group * TILE_STRIPS, (group + 1) * TILE_STRIPS, true);
  };
  if (threads_own_rows<T>(rows.count, team.size())) {
    run_with_stealing(
        team, member, [&](int) { return product.num_groups(); },
        [&](int share, int64_t group, int64_t next) {
          compute_group(rows.part(Share(rows.count, share, team.size())), group,
                        next != Team::NONE ? strips_of_group(next) : next_product);
        });
    return;
  }
  if (rows.count < DYNAMIC_ROWS) {
    const Share mine(product.num_strips(), member, team.size(), 2);
    compute(rows, mine.first, mine.last, next_product);
    return;
  }
  const ProductItems items(product.num_groups(), rows.count, team.size());
  for (int64_t i = member, next; i < items.count; i = next) {
    next = team.take();
    compute_group(rows.part(items.rows(i)), items.group(i),
                  next < items.count ? strips_of_group(items.group(next)) : next_product);
  }
}

}  // namespace quire
