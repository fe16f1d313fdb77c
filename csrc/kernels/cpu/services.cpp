#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {
namespace {

Services the_services;

}  // namespace

void set_services(const Services& services) { the_services = services; }

const Services& services() { return the_services; }

}  // namespace flash_attn_ext::cpu
