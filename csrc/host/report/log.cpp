#include "host/report/log.h"

#include <utility>

namespace flash_attn_ext::host {
namespace {

CopyLog& copy_log() {
  static CopyLog log;
  return log;
}

}  // namespace

void set_copy_log(CopyLog log) { copy_log() = std::move(log); }

void log_copy(const char* name, const at::Tensor& tensor, const char* needed) {
  if (copy_log()) copy_log()(name, tensor, needed);
}

}  // namespace flash_attn_ext::host
