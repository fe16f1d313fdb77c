// The dQ accumulator. Every tile of keys adds to the dQ of the queries that see it, so the sums stay in memory while a
// group of heads is processed: in dQ itself if that has the compute type, else in scratch memory.
#pragma once

#include "attention/params.h"
#include "kernels/cpu/gemm/operand.h"
#include "kernels/cpu/gemm/packed_operand.h"
#include "kernels/cpu/schedule/work_queue.h"

namespace flash_attn_ext::cpu {

template <class Real>
class DqSums {
 public:
  explicit DqSums(const attention::BackwardParams& params);

  bool wanted() const { return p_.dq.data != nullptr; }

  // Whether all keys fit one tile. Its work tile then stores dQ, and there are no sums of several work tiles.
  bool stored_at_once() const { return wanted() && one_tile_of_keys(p_) && p_.sequences.max_seqlen_k > 0; }
  // dQ of a tile of queries = scale * sums.
  void store(const attention::Sequence& sequence, int64_t head, const attention::Interval& queries,
             Block<const Real> sums) const;

  // Bytes that one key head takes (with all its query heads).
  int64_t bytes_per_key_head() const;

  // Sets the sums of these key heads' query heads to zero.
  void start(const HeadRange& key_heads);

  // The rows of a head from query `first` on.
  Block<Real> rows(const attention::Sequence& sequence, int64_t head, int64_t first);

  // dQ = scale * the sums.
  void finish();

 private:
  bool in_place() const { return dq().template readable_in_place<Real>(); }
  Operand dq() const { return {p_.dq, p_.element, p_.head_dim_qk}; }
  // Calls function(sequence, head, queries) for every tile of queries of the heads that are processed, on all threads.
  template <class Function>
  void for_each_tile(Function&& function) const;

  const attention::BackwardParams& p_;
  HeadRange key_heads_{};
  Scratch<Real> storage_;
};

}  // namespace flash_attn_ext::cpu
