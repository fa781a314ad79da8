// A shard of a tensor, by packs counted from its own start: a pack has one number on all ranks, whatever the alignment.
#pragma once

#include <type_traits>

#include "cuda/kernels/packs.cuh"
#include "cuda/kernels/shard_arguments.h"

namespace interlace {

constexpr int kShardThreads = 256;

template <typename T> struct Shard {
  T* elements;
  int64_t count;

  INTERLACE_DEVICE Shard(T* whole, const Shards& shards, int rank)
      : elements(whole + shards.begin(rank)), count(shards.rows(rank)) {}
  INTERLACE_DEVICE Words<std::remove_const_t<T>> load(int64_t i) const {
    return load_words<std::remove_const_t<T>>(elements, i, count, aligned_to_pack(elements));
  }
  INTERLACE_DEVICE void store(int64_t i, const Words<T>& pack) const {
    store_words(elements, i, count, aligned_to_pack(elements), pack);
  }
};

}  // namespace interlace
