// What happens to a score between q.k and the softmax, and its derivative, side by side.
//
//   product = q . k
//   scaled  = scale * product
//   capped  = softcap * tanh(scaled / softcap)
//   score   = capped - slope * |key - (query + diagonal)| + bias,   or -inf where the mask is False, no interval has
//             the key, or no block that is seen has it
//
// Visibility (visibility.h) is applied after that, then the softmax. A sink joins its denominator (online_softmax.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "attention/block_mask.h"
#include "attention/host_device.h"
#include "attention/row_intervals.h"

namespace flash_attn_ext::attention {

enum class ElementType : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kBool };

FLASH_HOST_DEVICE bool is_16_bit(ElementType element) {
  return element == ElementType::kBFloat16 || element == ElementType::kFloat16;
}

struct Coordinate {  // positions inside the sequence, whatever the tile
  int64_t batch;
  int64_t head;
  int64_t query;
  int64_t key;
};

// A bias or mask of shape (batch, heads, queries, keys) in which a broadcast dimension has stride 0. A
// relative-position (Toeplitz) bias stores one value per key - query. Its strides are -1 for queries and 1 for keys,
// and `data` points at the value of key - query = 0, so that offset() needs no special case.
struct BroadcastView {
  const void* data = nullptr;
  ElementType element = ElementType::kFloat32;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }
  // Of all views only that of a relative-position bias has a negative stride: tensors have none.
  FLASH_HOST_DEVICE bool is_relative() const { return query_stride < 0; }
  // Whether all queries of a head have the same values, and its keys have values of their own.
  FLASH_HOST_DEVICE bool is_of_keys() const { return present() && query_stride == 0 && key_stride != 0; }
  FLASH_HOST_DEVICE int64_t offset(const Coordinate& at) const {
    return at.batch * batch_stride + at.head * head_stride + at.query * query_stride + at.key * key_stride;
  }
};

// A summary of the mask, the intervals and the blocks, tile by tile, for backends that scan them before they use them.
// It has one byte for each tile of kSize queries x kSize keys of each batch entry and head of these. A broadcast
// dimension has stride 0 and one tile. Packed sequences with intervals have batch stride 0, and their rows of tiles
// follow each other.
struct MaskTiles {
  static constexpr int64_t kSize = 64;
  static constexpr uint8_t kSomeTrue = 1;
  static constexpr uint8_t kSomeFalse = 2;
  // The other bits say how many of the tiles just before this one, with smaller keys, are known to be hidden: numbers
  // below kExact as they are, and larger ones in steps of kExact. A scan of a mask does not find out. kAllBefore: all
  // of them.
  static constexpr uint32_t kHiddenBeforeShift = 2;
  static constexpr uint32_t kAllBefore = 63;
  static constexpr uint32_t kExact = 32;
  FLASH_HOST_DEVICE static uint32_t encode_hidden_before(uint32_t tiles) {
    const uint32_t code = tiles < kExact ? tiles : kExact - 1 + tiles / kExact;
    return code < kAllBefore ? code : kAllBefore - 1;
  }
  FLASH_HOST_DEVICE static uint32_t decode_hidden_before(uint32_t code) {
    return code < kExact ? code : (code + 1 - kExact) * kExact;
  }

  uint8_t* data = nullptr;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t key_stride = 0;
  const int32_t* first_queries = nullptr;  // of packed sequences with intervals
  int64_t num_queries = 0;                 // of all these

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }

  // The row of tiles that has a batch entry's first queries. Offsets in a GPU's memory are not checked, but clamped.
  FLASH_HOST_DEVICE int64_t first_row(int64_t batch) const {
    if (first_queries == nullptr) return 0;
    const int64_t first = first_queries[batch];
    return (first < 0 ? 0 : first < num_queries ? first : num_queries) / kSize + batch;
  }

  // The flags of 64 queries, for the first tile of keys.
  FLASH_HOST_DEVICE uint8_t* row(int64_t batch, int64_t head, int64_t query_tile) const {
    return data + batch * batch_stride + head * head_stride + (first_row(batch) + query_tile) * query_stride;
  }
};

// The mask packed into bits, for backends that pack it before they use it, in the order in which threads hold scores.
// There is a word for each query, group of 128 keys and thread of a quad. Its bit 2 j + e stands for key 8 j + 2
// (thread of the quad) + e of the group. One extra group of four words follows those of each query.
struct MaskBits {
  static constexpr int64_t kKeys = 128;

  uint32_t* data = nullptr;
  int64_t batch_stride = 0;  // in words, 0 where the mask is broadcast
  int64_t head_stride = 0;
  int64_t query_stride = 0;
  int64_t words = 0;  // in all

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }
};

// ALiBi (Press et al. 2022, section 3): a slope per head, or per batch entry and head.
struct AlibiSlopes {
  const void* data = nullptr;  // accumulate type
  int64_t batch_stride = 0;
  int64_t head_stride = 0;

  FLASH_HOST_DEVICE bool present() const { return data != nullptr; }
  template <class Real>
  FLASH_HOST_DEVICE Real at(int64_t batch, int64_t head) const {
    return static_cast<const Real*>(data)[batch * batch_stride + head * head_stride];
  }
};

// d score / d slope at the distance key - (query + diagonal).
template <class Number>
FLASH_HOST_DEVICE Number alibi_derivative(Number distance) {
  return -std::abs(distance);
}
FLASH_HOST_DEVICE int64_t alibi_derivative(int64_t query, int64_t key, int64_t diagonal) {
  return alibi_derivative(key - (query + diagonal));
}

// The elementwise part. Math provides tanh(Real); each backend has its own.
template <class Real, class Math>
struct ScoreTransform {
  Real scale;
  Real softcap;  // 0: none
  Real inverse_softcap;

  // product -> capped.
  FLASH_HOST_DEVICE Real cap(Real product) const {
    const Real scaled = scale * product;
    return softcap == Real(0) ? scaled : softcap * Math::tanh(scaled * inverse_softcap);
  }

  // d capped / d scaled. The remaining factor, scale, is applied once to whole rows of dQ and dK.
  FLASH_HOST_DEVICE Real cap_derivative(Real capped) const {
    const Real t = capped * inverse_softcap;  // 0 without a softcap
    return Real(1) - t * t;
  }

  // product -> score. added = ALiBi + bias; -inf means masked, and hides even a NaN in q or k.
  FLASH_HOST_DEVICE Real forward(Real product, Real added) const {
    return added == -std::numeric_limits<Real>::infinity() ? added : cap(product) + added;
  }

  // d loss / d scaled from d loss / d score. A masked element has dscore = 0 exactly; its product may be NaN.
  FLASH_HOST_DEVICE Real backward(Real dscore, Real product) const {
    if (softcap == Real(0)) return dscore;
    return dscore == Real(0) ? dscore : dscore * cap_derivative(cap(product));
  }
};

struct ScoreMod {
  double scale = 1.0;
  double softcap = 0.0;  // 0: none
  AlibiSlopes alibi;
  BroadcastView bias;
  BroadcastView mask;  // bool, one byte each: True = attend
  MaskTiles mask_tiles;
  MaskBits mask_bits;
  RowIntervals intervals;
  BlockMask blocks;

  // Whether intervals or blocks say which keys each query sees.
  FLASH_HOST_DEVICE bool selects_keys() const { return intervals.present() || blocks.present(); }

  // Whether a mask, intervals or blocks hide keys.
  FLASH_HOST_DEVICE bool hides_keys() const { return mask.present() || selects_keys(); }

  // Whether a score is scale only, as the fast kernels require.
  FLASH_HOST_DEVICE bool plain() const {
    return softcap == 0.0 && !alibi.present() && !bias.present() && !hides_keys();
  }

  // Whether every score is scale * q.k or masked, with a positive scale, which can then be folded into the exponent.
  FLASH_HOST_DEVICE bool only_scales() const {
    return softcap == 0.0 && !alibi.present() && !bias.present() && scale > 0.0;
  }

  template <class Real, class Math>
  FLASH_HOST_DEVICE ScoreTransform<Real, Math> transform() const {
    const Real cap = static_cast<Real>(softcap);
    return {static_cast<Real>(scale), cap, cap == Real(0) ? Real(0) : Real(1) / cap};
  }
};

}  // namespace flash_attn_ext::attention
