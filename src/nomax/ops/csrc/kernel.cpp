// The kernels of one instruction set: compiled once for each, with NOMAX_ISA as its name. Nothing of the C++ library is
// used here, so that no inline function compiled for a newer CPU can end up being called on an older one.
#include "backward.h"
#include "cross_entropy.h"
#include "dropout.h"
#include "forward.h"
#include "gelu.h"
#include "layer_norm.h"
#include "linear.h"
#include "look_up.h"

namespace nomax {
namespace NOMAX_ISA {

#if defined(NOMAX_MULTIPLIES_PAIRS)
#define NOMAX_BY_TYPE(name, p, ...) (p.query.type == Type::bfloat16 ? name<Pair>(__VA_ARGS__) : name<Float>(__VA_ARGS__))
#else
#define NOMAX_BY_TYPE(name, p, ...) name<Float>(__VA_ARGS__)
#endif

template <class Element> static int64_t bytes_forward(const Problem& p) { return bytes_of<ForwardMemory<Element>>(p); }
template <class Element> static int64_t bytes_backward(const Problem& p) { return bytes_of<BackwardMemory<Element>>(p); }
template <class Element> static int64_t bytes_bias(const Problem& p) { return bytes_of<BiasMemory<Element>>(p); }

static int64_t width(int64_t columns) { return round_up(columns, W); }
static int64_t forward_bytes(const Problem& p) { return NOMAX_BY_TYPE(bytes_forward, p, p); }
static int64_t backward_bytes(const Problem& p) { return NOMAX_BY_TYPE(bytes_backward, p, p); }
static int64_t bias_bytes(const Problem& p) { return NOMAX_BY_TYPE(bytes_bias, p, p); }
static int64_t linear_bytes(const Problem& p) { return bytes_of<LinearMemory>(p); }

static void forward(const Problem& p, const Task& t, void* workspace) { NOMAX_BY_TYPE(forward_rows, p, p, t, workspace); }
static bool backward(const Problem& p, const Task& t, void* workspace, bool careful) {
  return NOMAX_BY_TYPE(backward_keys, p, p, t, workspace, careful);
}
static void bias(const Problem& p, const Task& t, void* workspace) { NOMAX_BY_TYPE(bias_gradient, p, p, t, workspace); }

}  // namespace NOMAX_ISA

#define NOMAX_JOIN(a, b) a##b
#define NOMAX_NAME(isa) NOMAX_JOIN(kernel_, isa)
#define NOMAX_TEXT(x) #x
#define NOMAX_STRING(x) NOMAX_TEXT(x)

using namespace NOMAX_ISA;
extern const Kernel NOMAX_NAME(NOMAX_ISA);
const Kernel NOMAX_NAME(NOMAX_ISA) = {
    NOMAX_STRING(NOMAX_ISA), width, forward_bytes, forward,      backward_bytes, backward,
    reduce_query_gradient,   bias_bytes, bias,     linear_bytes, linear_keys,    linear_queries,
    norm_forward,            norm_backward, entropy_forward, entropy_backward, gelu,
    dropout,                 look_up_bytes, look_up};

}  // namespace nomax
