// Only declared: the programs here call other parts of the headers that use it.
#pragma once

namespace flash_attn_ext::ptx {

uint32_t shared_address(const void* pointer);

}  // namespace flash_attn_ext::ptx
