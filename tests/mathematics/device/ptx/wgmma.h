// Only declared: the programs here call other parts of the headers that use it.
#pragma once

namespace flash_attn_ext::ptx {

template <class Sums, class Element>
void multiply_async(Sums& sums, uint64_t a, uint64_t b, bool accumulate, Element);
template <class Sums, class Element>
void multiply_rows_async(Sums& sums, const uint32_t (&a)[4], uint64_t b, bool accumulate, Element);

}  // namespace flash_attn_ext::ptx
