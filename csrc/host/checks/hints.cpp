#include "host/checks/hints.h"

namespace flash_attn_ext::host {
namespace {

std::string exchanged(const AttentionInputs& in, bool fits) {
  if (!fits) return "";
  return std::string("; it would fit with heads and sequence exchanged: layout=") +
         (in.sequence_first ? "'bhsd' takes (batch, heads, sequence, head dim)"
                            : "'bshd' takes (batch, sequence, heads, head dim)");
}

}  // namespace

std::string hint_at_layout(const AttentionInputs& in) {
  if (in.packed()) return "";
  const bool same = in.k.size(1) == in.v.size(1) && in.k.size(2) == in.v.size(2);
  return exchanged(in, same && in.k.size(2) > 0 && in.q.size(2) % in.k.size(2) == 0);
}

std::string hint_at_layout(const AttentionInputs& in, const at::Tensor& of_heads) {
  return exchanged(in, !in.packed() && of_heads.dim() > 0 && of_heads.size(-1) == in.q.size(2));
}

std::string hint_at_dimensions(const char* name, const at::Tensor& table, const AttentionInputs& in,
                               const SequenceLengths& longest) {
  if (table.dim() != 4 || table.size(0) != 1 || table.size(3) != longest.keys) return "";
  if (table.size(1) == 1 && table.size(2) == in.batch()) {
    return std::string("; pass ") + name + "[:, None, None, :] where it is (batch, keys)";
  }
  if (table.size(1) == in.batch() && (table.size(2) == longest.queries || table.size(2) == 1)) {
    return std::string("; pass ") + name + "[:, None] where it is (batch, queries, keys)";
  }
  return "";
}

const char* hint_at_mask(at::ScalarType dtype_of_bias) {
  if (dtype_of_bias == at::kBool) return "; a boolean mask goes into mask= (True = attend)";
  if (!at::isFloatingType(dtype_of_bias)) return "; flags of 0 and 1 go into mask=, as bias.bool() (True = attend)";
  return "; cast it with bias.to(q.dtype), but flags of 0 and 1 go into mask=, as bias.bool() (True = attend)";
}

const char* hint_at_bias(at::ScalarType dtype_of_mask) {
  if (!at::isFloatingType(dtype_of_mask)) return "; pass mask.bool()";
  return "; a float mask goes into bias=, which is added to the scores, but flags of 0 and 1 are passed as mask.bool()";
}

}  // namespace flash_attn_ext::host
