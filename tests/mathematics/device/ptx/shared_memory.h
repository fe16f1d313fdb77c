// Declared for headers of which the programs here call other parts.
#pragma once

namespace flash_attn_ext::ptx {

uint32_t shared_address(const void* pointer);

}  // namespace flash_attn_ext::ptx
