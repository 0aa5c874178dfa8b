// The scratch buffers of one step. The memory is kept for later steps and grows when a step needs
// more.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace quire {

class Workspace {
 public:
  // Requests a buffer of `size` elements; reserve() sets `*buffer` to it.
  template <class E>
  void add(E** buffer, int64_t size) {
    requests_.push_back({(void**)buffer, used_});
    used_ += (size * (int64_t)sizeof(E) + 127) / 64 * 64;
  }

  // Allocates all requested buffers and `padding` readable bytes after the last one. Throws
  // std::bad_alloc, and keeps the memory of the last step then.
  void reserve(int64_t padding) {
    const std::vector<Request> requests = std::move(requests_);
    const int64_t needed = used_ + (padding + 63) / 64 * 64;
    requests_.clear();
    used_ = 0;
    if (needed > size_) {
      char* memory = (char*)std::aligned_alloc(64, (size_t)needed);
      if (memory == nullptr) throw std::bad_alloc();
      memory_.reset(memory);
      size_ = needed;
    }
    for (const Request& request : requests) *request.buffer = memory_.get() + request.offset;
  }

 private:
  struct Request {
    void** buffer;
    int64_t offset;
  };
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  std::vector<Request> requests_;
  int64_t used_ = 0, size_ = 0;
  std::unique_ptr<char, Free> memory_;
};

}  // namespace quire
