// Memory of one step, kept from step to step and grown when a larger step comes.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace quire {

class Workspace {
 public:
  // Asks for `size` elements; `*place` points to them once reserve() has returned.
  template <class E>
  void add(E** place, int64_t size) {
    pieces_.push_back({(void**)place, used_});
    used_ += (size * (int64_t)sizeof(E) + 127) / 64 * 64;
  }

  // `behind` more bytes may be read behind the last element. Throws std::bad_alloc and keeps what it
  // had.
  void reserve(int64_t behind) {
    const std::vector<Piece> pieces = std::move(pieces_);
    const int64_t needed = used_ + (behind + 63) / 64 * 64;
    pieces_.clear();
    used_ = 0;
    if (needed > size_) {
      char* memory = (char*)std::aligned_alloc(64, (size_t)needed);
      if (memory == nullptr) throw std::bad_alloc();
      memory_.reset(memory);
      size_ = needed;
    }
    for (const Piece& piece : pieces) *piece.place = memory_.get() + piece.offset;
  }

 private:
  struct Piece {
    void** place;
    int64_t offset;
  };
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  std::vector<Piece> pieces_;
  int64_t used_ = 0, size_ = 0;
  std::unique_ptr<char, Free> memory_;
};

}  // namespace quire
