// A growable array in 16 bytes: millions of users each own two of them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace mtserve {

template <class T>
class IdList {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  IdList() = default;
  IdList(const IdList&) = delete;
  IdList& operator=(const IdList&) = delete;
  ~IdList() { std::free(data_); }

  int32_t size() const { return static_cast<int32_t>(size_); }
  bool empty() const { return size_ == 0; }
  T& operator[](int32_t i) { return data_[i]; }
  const T& operator[](int32_t i) const { return data_[i]; }
  T& back() { return data_[size_ - 1]; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }

  void push_back(T value) {
    if (size_ == capacity_) reallocate(capacity_ < 4 ? 4 : capacity_ + capacity_ / 2);
    data_[size_++] = value;
  }

  void pop_back() {
    // A user that left must not keep the memory of a long list.
    if (--size_ == 0) {
      std::free(data_);
      data_ = nullptr;
      capacity_ = 0;
    }
  }

 private:
  void reallocate(uint32_t capacity) {
    T* grown = static_cast<T*>(std::realloc(static_cast<void*>(data_), capacity * sizeof(T)));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = grown;
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  uint32_t size_ = 0;
  uint32_t capacity_ = 0;
};

}  // namespace mtserve
