// A product of a step, cut into work for a team. Knows no layer.
#pragma once

#include "decoder.h"
#include "multiply.h"
#include "team.h"

namespace quire {

// From so many rows on a product's strips are taken, not shared out: they take long enough for one
// thread to be held up, and the others then do its part.
constexpr int64_t TAKING_ROWS = 16;

// A linear layer and the one that is multiplied after it: between the two are barriers, norms or
// attention, and whoever is done with its part has the next one's first strips on their way.
struct Product {
  QuireLinear linear;
  const Product* next = nullptr;

  int64_t num_strips() const { return (linear.outputs + LANES - 1) / LANES; }
  int64_t num_groups() const { return (num_strips() + TILE_STRIPS - 1) / TILE_STRIPS; }
  const uint32_t* packed() const { return (const uint32_t*)linear.packed; }
};

// How a team takes a product: as many groups of strips as go round evenly are taken whole, and each
// of those left over is cut by rows, a part for everyone.
class ProductPieces {
 public:
  const int64_t count;

  ProductPieces(int64_t groups, int64_t rows, int size)
      : count(groups / size * size + groups % size * size),
        num_whole_(groups / size * size),
        rows_(rows),
        size_(size) {}

  int64_t group(int64_t piece) const {
    return piece < num_whole_ ? piece : num_whole_ + (piece - num_whole_) / size_;
  }
  Share rows(int64_t piece) const {
    if (piece < num_whole_) return Share(rows_, 0, 1);
    return Share(rows_, (int)((piece - num_whole_) % size_), size_);
  }

 private:
  const int64_t num_whole_, rows_;
  const int size_;
};

// Where the strips first .. last-1 of a product lie.
template <class T>
inline Ahead strips_of(const Product& product, int64_t first, int64_t last, bool same = false) {
  const int64_t words = product.linear.inputs / T::PER_WORD * LANES;
  const int64_t count = std::min(last, product.num_strips()) - first;
  return {product.packed() + first * words, count * words, false, same};
}

// Whether everyone multiplies rows of its own, which it also norms, gates and attends for: lines
// that a core of another part of the processor wrote last are slow to come. Then everyone reads all
// strips, and has to have so many rows that they arrive meanwhile.
template <class T>
inline bool has_own_rows(int64_t rows, int size) {
  return Tiles<T>::OWN_ROWS > 0 && rows >= Tiles<T>::OWN_ROWS * size;
}

// Those that a member of a team will begin with.
template <class T>
inline Ahead first_strips(const Product& product, int64_t rows, int member, int size) {
  int64_t first = Share(product.num_strips(), member, size, 2).first;
  if (has_own_rows<T>(rows, size))
    first = 0;
  else if (rows >= TAKING_ROWS)
    first = TILE_STRIPS * ProductPieces(product.num_groups(), rows, size).group(member);
  return strips_of<T>(product, first, first + TILE_STRIPS);
}

// One thread's part of rows times a product; done(row, strip, values, count) as in multiply().
template <class T, class Done>
void multiply_part(const Product& product, const Rows<T>& rows, Team& team, int member, float* sums,
                   const Done& done) {
  const Ahead then = first_strips<T>(*product.next, rows.count, member, team.size());
  const auto compute = [&](const Rows<T>& rows, int64_t first, int64_t last, const Ahead& next) {
    multiply<T>(rows, product.packed(), product.linear.inputs / T::PER_WORD, first, last, next,
                sums, done);
  };
  const auto compute_group = [&](const Rows<T>& rows, int64_t group, const Ahead& next) {
    const int64_t first = group * TILE_STRIPS;
    compute(rows, first, std::min(first + TILE_STRIPS, product.num_strips()), next);
  };
  const auto strips_of_group = [&](int64_t group) {
    return strips_of<T>(product, group * TILE_STRIPS, (group + 1) * TILE_STRIPS, true);
  };
  if (has_own_rows<T>(rows.count, team.size())) {
    take_shares(
        team, member, [&](int) { return product.num_groups(); },
        [&](int share, int64_t group, int64_t next) {
          compute_group(rows.part(Share(rows.count, share, team.size())), group,
                        next != Team::NONE ? strips_of_group(next) : then);
        });
    return;
  }
  if (rows.count < TAKING_ROWS) {
    const Share mine(product.num_strips(), member, team.size(), 2);
    compute(rows, mine.first, mine.last, then);
    return;
  }
  const ProductPieces pieces(product.num_groups(), rows.count, team.size());
  for (int64_t i = member, next; i < pieces.count; i = next) {
    next = team.take();
    compute_group(rows.part(pieces.rows(i)), pieces.group(i),
                  next < pieces.count ? strips_of_group(pieces.group(next)) : then);
  }
}

}  // namespace quire
