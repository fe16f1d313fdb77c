// The fields of a call, listed once. All code that packs, saves, boxes or differentiates a call uses these lists.
#pragma once

#include <tuple>
#include <type_traits>

#include "host/call/cache_inputs.h"
#include "host/call/inputs.h"

namespace flash_attn_ext::host {

template <class Inputs, class Member>
struct Field {
  const char* name;
  Member Inputs::*member;
  static constexpr bool kIsTensor =
      std::is_same_v<Member, at::Tensor> || std::is_same_v<Member, std::optional<at::Tensor>>;
};
template <class Inputs, class Member>
Field(const char*, Member Inputs::*) -> Field<Inputs, Member>;

// Every field, in the order of Problem (flash_attn_ext/_call/problem.py), the tuple that Python and C++ exchange.
inline constexpr auto kFields = std::make_tuple(
    Field{"q", &AttentionInputs::q}, Field{"k", &AttentionInputs::k}, Field{"v", &AttentionInputs::v},
    Field{"bias", &AttentionInputs::bias}, Field{"mask", &AttentionInputs::mask},
    Field{"alibi_slopes", &AttentionInputs::alibi_slopes}, Field{"sink", &AttentionInputs::sink},
    Field{"intervals", &AttentionInputs::intervals}, Field{"blocks", &AttentionInputs::blocks},
    Field{"cu_seqlens_q", &AttentionInputs::cu_seqlens_q}, Field{"cu_seqlens_k", &AttentionInputs::cu_seqlens_k},
    Field{"rng_seed", &AttentionInputs::rng_seed}, Field{"scale", &AttentionInputs::scale},
    Field{"softcap", &AttentionInputs::softcap}, Field{"causal", &AttentionInputs::causal},
    Field{"window_left", &AttentionInputs::window_left}, Field{"window_right", &AttentionInputs::window_right},
    Field{"dropout_p", &AttentionInputs::dropout_p}, Field{"max_seqlen_q", &AttentionInputs::max_seqlen_q},
    Field{"max_seqlen_k", &AttentionInputs::max_seqlen_k}, Field{"backend", &AttentionInputs::backend},
    Field{"allow_tf32", &AttentionInputs::allow_tf32}, Field{"sequence_first", &AttentionInputs::sequence_first},
    Field{"wants_row_max", &AttentionInputs::wants_row_max},
    Field{"bias_is_relative", &AttentionInputs::bias_is_relative});

// The further fields of a call with a cache, in the order of KvCache (flash_attn_ext/_call/problem.py).
inline constexpr auto kCacheFields = std::make_tuple(
    Field{"cache_seqlens", &KvCacheInputs::cache_seqlens}, Field{"k_new", &KvCacheInputs::k_new},
    Field{"v_new", &KvCacheInputs::v_new}, Field{"block_table", &KvCacheInputs::block_table},
    Field{"cache_batch_idx", &KvCacheInputs::cache_batch_idx}, Field{"rotary_cos", &KvCacheInputs::rotary_cos},
    Field{"rotary_sin", &KvCacheInputs::rotary_sin}, Field{"rotary_interleaved", &KvCacheInputs::rotary_interleaved});

constexpr const auto& fields_of(const AttentionInputs&) { return kFields; }
constexpr const auto& fields_of(const KvCacheInputs&) { return kCacheFields; }

// The fields that get gradients, in the order of BackwardInputs::output_mask.
inline constexpr auto kDifferentiable =
    std::make_tuple(Field{"q", &AttentionInputs::q}, Field{"k", &AttentionInputs::k}, Field{"v", &AttentionInputs::v},
                    Field{"bias", &AttentionInputs::bias}, Field{"alibi_slopes", &AttentionInputs::alibi_slopes},
                    Field{"sink", &AttentionInputs::sink});
static_assert(std::tuple_size_v<decltype(kDifferentiable)> == std::tuple_size_v<decltype(BackwardInputs::output_mask)>);

inline constexpr size_t kNumTensors =
    std::apply([](auto... field) { return (size_t{0} + ... + size_t{field.kIsTensor}); }, kFields);

template <class Inputs, class Visit>
void visit_fields(Inputs& in, Visit&& visit) {
  std::apply([&](const auto&... field) { (visit(field.name, in.*field.member), ...); }, fields_of(in));
}

template <class Inputs, class Visit>
void visit_tensors(Inputs& in, Visit&& visit) {
  const auto visit_if_tensor = [&](const auto& field) {
    if constexpr (std::decay_t<decltype(field)>::kIsTensor) visit(in.*field.member);
  };
  std::apply([&](const auto&... field) { (visit_if_tensor(field), ...); }, fields_of(in));
}

}  // namespace flash_attn_ext::host
