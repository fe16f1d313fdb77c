#include "attention/dscore_row_sums.h"
#include "kernels/cpu/cpu_kernels.h"
#include "kernels/cpu/services.h"

namespace flash_attn_ext::cpu {
namespace {

// Computes the gradient element by element.
template <class Real>
void dbias_from_rows_as(const attention::BackwardParams& p) {
  constexpr int64_t kElementsPerTask = 256;
  const attention::DbiasOwners owners(p, 1);
  parallel_for(owners.count(), kElementsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const attention::DbiasOwner owner = owners.at(index);
      const double sum = owner.finish_delta<Real>(p, owner.queries, 1);
      static_cast<Real*>(p.dbias.data)[owner.offset(p.dbias, owner.queries.begin)] = static_cast<Real>(sum);
    }
  });
}

}  // namespace

void dbias_from_rows(const attention::BackwardParams& params) {
  params.element == attention::ElementType::kFloat64 ? dbias_from_rows_as<double>(params)
                                                     : dbias_from_rows_as<float>(params);
}

}  // namespace flash_attn_ext::cpu
