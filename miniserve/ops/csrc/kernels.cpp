// The C interface of the `cpu` kernel set: what `ops/cpu.py` calls. Nothing is decided here. The structs that pass
// (Weight, Memory, Requests, Rotation, ...Arguments) have their twins there.
//
//     simd.h       16 numbers at a time; storage types; the one micro-kernel
//     threads.h    the pool
//     matmul.h     packed weights, products with epilogues
//     attention.h  paged attention, writing of K/V
//
// Activations are float32; weights, keys and values are float32 (dtype 0), bfloat16 (dtype 1) or int8 (dtype 2). Strides are in elements; the last dimension is contiguous.

#include <sys/mman.h>
#include <unistd.h>

#include "attention.h"
#include "matmul.h"

using namespace miniserve;

namespace {

template <class Body>
void with_dtype(int dtype, const Body& body) {
  if (dtype == 0)
    body(Float32());
  else
    body(BFloat16());
}

template <class Body>
void with_kv_dtype(int dtype, const Body& body) {
  if (dtype == 2)
    body(WideInt8());
  else
    with_dtype(dtype, body);
}

template <class Body>
void with_weight_dtype(int dtype, const Body& body) {
  if (dtype == 2)
    body(Int8());
  else
    with_dtype(dtype, body);
}

float widen_source(const void* weight, int is_bfloat16, long index) {
  return is_bfloat16 ? BFloat16::widen(static_cast<const uint16_t*>(weight)[index])
                     : static_cast<const float*>(weight)[index];
}

// Rows in tasks that are worth a thread.
template <class Body>
void for_rows(ThreadPool& pool, long rows, long dim, const Body& body) {
  const long per_task = std::max<long>(1, 16384 / dim);
  pool.parallel_for((rows + per_task - 1) / per_task, [&](long task) {
    for (long row = task * per_task; row < std::min(rows, (task + 1) * per_task); ++row) body(row);
  });
}

// Operations on each head: x (rows, heads, dim), row stride given -> y, contiguous.
struct RowArguments {
  const float *x, *weight, *bias;
  const Rotation* rotation;
  float* y;
  long x_stride, rows, heads, dim;
  float eps;

  template <class Body>
  void for_heads(void* pool, const Body& body) const {
    for_rows(*static_cast<ThreadPool*>(pool), rows, heads * dim, [&](long row) {
      for (long head = 0; head < heads; ++head)
        body(row, x + row * x_stride + head * dim, y + (row * heads + head) * dim);
    });
  }
};

}  // namespace

extern "C" {

void* miniserve_pool_new(int num_threads) { return new ThreadPool(num_threads); }
void miniserve_pool_delete(void* pool) { delete static_cast<ThreadPool*>(pool); }

// Asks the system to back memory with large pages, where it does so on request. K/V of a head and 16 tokens is 2 KiB
// somewhere in gigabytes: with pages of 4 KiB finding it costs as much as reading it.
void miniserve_use_large_pages(void* memory, long bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), first = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (first + page - 1) / page * page, end = (first + bytes) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a wish: it may be refused
#endif
}

// Panels of 32 outputs (see matmul.h); `gated` puts rows j and N / 2 + j of the weight beside each other. `scales` of
// the outputs, in panel order, are written for int8 and null otherwise.
void miniserve_pack(void* pool, int dtype, const void* weight, int is_bfloat16, long outputs, long inputs, int gated,
                    void* packed, float* scales) {
  with_weight_dtype(dtype, [&](auto type) {
    typedef decltype(type) T;
    const long half = outputs / 2, steps = (inputs + T::kPack - 1) / T::kPack;
    const long num_panels = gated ? (half + kLanes - 1) / kLanes : (outputs + kPanel - 1) / kPanel;
    static_cast<ThreadPool*>(pool)->parallel_for(num_panels, [&](long panel) {
      typename T::Stored* out = static_cast<typename T::Stored*>(packed) + panel * steps * kPanel * T::kPack;
      for (long column = 0; column < kPanel; ++column) {
        long row = panel * kPanel + column, stop = outputs;
        if (gated) {
          row = panel * kLanes + column % kLanes + column / kLanes * half;
          stop = column < kLanes ? half : outputs;
        }
        const auto at = [&](long input) {
          return row < stop && input < inputs ? widen_source(weight, is_bfloat16, row * inputs + input) : 0.0f;
        };
        float inverse = 1;
        if (scales) {
          float largest = 0;
          for (long input = 0; input < inputs; ++input) largest = std::max(largest, std::fabs(at(input)));
          scales[panel * kPanel + column] = largest / 127.0f;
          inverse = largest > 0 ? 127.0f / largest : 0;
        }
        for (long input = 0; input < steps * T::kPack; ++input)
          out[(input / T::kPack * kPanel + column) * T::kPack + input % T::kPack] = T::round(at(input) * inverse);
      }
    });
  });
}

// Every operation of a model takes one struct, so that a step is a list of calls: see `miniserve_run`.

struct LinearArguments {
  const Weight* weight;
  const float *x, *norm_weight, *residual;  // norm_weight and residual may be null
  float* y;
  long x_stride, rows, residual_stride;
  float eps;
  int activation;
};

void miniserve_linear(void* pool, const LinearArguments* a) {
  const Norm norm = {a->norm_weight, a->eps};
  const Epilogue epilogue = {*a->weight, a->residual, a->residual_stride, static_cast<Activation>(a->activation), a->y};
  with_weight_dtype(a->weight->dtype, [&](auto type) {
    Matmul<decltype(type)>(*a->weight, a->x, a->x_stride, a->rows, norm, epilogue).run(*static_cast<ThreadPool*>(pool));
  });
}

void miniserve_rms_norm(void* pool, const RowArguments* a) {
  const Norm norm = {a->weight, a->eps};
  a->for_heads(pool, [&](long, const float* in, float* out) { norm.apply(in, a->dim, out); });
}

void miniserve_layer_norm(void* pool, const RowArguments* a) {
  a->for_heads(pool, [&](long, const float* in, float* out) {
    double total = 0, squares = 0;
    for (long d = 0; d < a->dim; ++d) total += in[d];
    const float mean = static_cast<float>(total / a->dim);
    for (long d = 0; d < a->dim; ++d) squares += (in[d] - mean) * (in[d] - mean);
    const float scale = 1.0f / std::sqrt(static_cast<float>(squares / a->dim) + a->eps);
    for (long d = 0; d < a->dim; ++d) out[d] = (in[d] - mean) * scale * a->weight[d] + a->bias[d];
  });
}

void miniserve_rotate(void* pool, const RowArguments* a) {
  a->for_heads(pool, [&](long row, const float* in, float* out) { a->rotation->apply(row, in, a->dim, out); });
}

struct AngleArguments {
  const int64_t* positions;  // (rows,)
  const float* inv_freq;  // (half,)
  float *cos, *sin;  // (rows, half)
  long rows, half;
  float factor;
};

void miniserve_angles(void* pool, const AngleArguments* a) {
  for_rows(*static_cast<ThreadPool*>(pool), a->rows, 64 * a->half, [&](long row) {
    for (long i = 0; i < a->half; ++i) {
      const float angle = static_cast<float>(a->positions[row]) * a->inv_freq[i];
      a->cos[row * a->half + i] = std::cos(angle) * a->factor;
      a->sin[row * a->half + i] = std::sin(angle) * a->factor;
    }
  });
}

struct EmbedArguments {
  const int64_t* token_ids;  // (rows,)
  const void* table;  // (V, dim)
  float* y;
  long rows, dim;
  int dtype;
};

void miniserve_embed(void* pool, const EmbedArguments* a) {
  for_rows(*static_cast<ThreadPool*>(pool), a->rows, a->dim, [&](long row) {
    const long first = a->token_ids[row] * a->dim;
    for (long d = 0; d < a->dim; ++d) a->y[row * a->dim + d] = widen_source(a->table, a->dtype, first + d);
  });
}

struct WriteArguments {
  const Memory* memory;
  const Requests* requests;
  const float *k, *v;
  const Rotation* rotation;  // may be null
  long k_stride, v_stride;
};

void miniserve_write_kv(void* pool, const WriteArguments* a) {
  with_kv_dtype(a->memory->dtype, [&](auto type) {
    write_kv<decltype(type)>(*static_cast<ThreadPool*>(pool), a->k, a->k_stride, a->v, a->v_stride, *a->requests,
                             a->rotation, *a->memory);
  });
}

struct AttendArguments {
  const Memory* memory;
  const Requests* requests;
  const float* q;
  const Rotation *rotation, *key_rotation;  // may be null
  float* out;
  long q_stride, q_heads, window;
  float scale, softcap;
  int diagonal;
};

void miniserve_attend(void* pool, const AttendArguments* a) {
  const AttentionOptions options = {a->scale, a->window, a->softcap, a->diagonal != 0, a->rotation, a->key_rotation};
  with_kv_dtype(a->memory->dtype, [&](auto type) {
    Attention<decltype(type)>(a->q, a->q_stride, a->q_heads, *a->memory, *a->requests, options, a->out)
        .run(*static_cast<ThreadPool*>(pool));
  });
}

// Calls that were recorded, one after the other.
struct Call {
  void (*function)(void* pool, const void* arguments);
  const void* arguments;
};

void miniserve_run(void* pool, const Call* calls, long count) {
  for (long i = 0; i < count; ++i) calls[i].function(pool, calls[i].arguments);
}

// The index of the largest of each row, the first of equals.
void miniserve_argmax(void* pool, const float* x, long x_stride, long rows, long dim, int64_t* out) {
  for_rows(*static_cast<ThreadPool*>(pool), rows, dim, [&](long row) {
    const float* in = x + row * x_stride;
    Floats best = splat(-INFINITY);
    long d = 0;
    for (; d + kLanes <= dim; d += kLanes) best = max(best, load(in + d));
    float peak = max(best);
    for (; d < dim; ++d) peak = in[d] > peak ? in[d] : peak;
    out[row] = 0;
    for (d = 0; d < dim; ++d)
      if (in[d] == peak) {
        out[row] = d;
        break;
      }
  });
}
}
