// What all kernels know about their current work tile.
#pragma once

#include "attention/sequence.h"

namespace flash_attn_ext {

// The head that a CTA works on.
struct WorkItem {
  attention::Sequence sequence;
  int64_t head;
  int64_t key_head;
};

}  // namespace flash_attn_ext
