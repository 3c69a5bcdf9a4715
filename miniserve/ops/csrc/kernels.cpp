// The C interface of the `cpu` kernel set: what `ops/cpu.py` calls. Nothing is decided here.
//
//     simd.h       16 numbers at a time; storage types; the one micro-kernel
//     threads.h    the pool
//     matmul.h     packed weights, products with epilogues
//     attention.h  paged attention, writing of K/V
//
// Activations are float32; weights, keys and values are float32 (dtype 0) or bfloat16 (dtype 1). Strides are in
// elements; the last dimension is contiguous.

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

}  // namespace

extern "C" {

void* miniserve_pool_new(int num_threads) { return new ThreadPool(num_threads); }
void miniserve_pool_delete(void* pool) { delete static_cast<ThreadPool*>(pool); }

// Panels of 32 outputs (see matmul.h); `gated` puts rows j and N / 2 + j of the weight beside each other.
void miniserve_pack(void* pool, int dtype, const void* weight, int is_bfloat16, long outputs, long inputs, int gated,
                    void* packed) {
  with_dtype(dtype, [&](auto type) {
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
        for (long input = 0; input < steps * T::kPack; ++input) {
          const bool inside = row < stop && input < inputs;
          const float w = inside ? widen_source(weight, is_bfloat16, row * inputs + input) : 0.0f;
          out[(input / T::kPack * kPanel + column) * T::kPack + input % T::kPack] = T::round(w);
        }
      }
    });
  });
}

void miniserve_linear(void* pool, int dtype, const float* x, long x_stride, long rows, long inputs, const void* packed,
                      long num_panels, const float* bias, const float* residual, long residual_stride, int activation,
                      int gated, float* y, long y_stride, long outputs) {
  const Epilogue epilogue = {bias, residual, residual_stride, static_cast<Activation>(activation), gated != 0,
                             y, y_stride, outputs};
  with_dtype(dtype, [&](auto type) {
    typedef decltype(type) T;
    Matmul<T>(x, x_stride, rows, inputs, static_cast<const typename T::Stored*>(packed), num_panels, epilogue)
        .run(*static_cast<ThreadPool*>(pool));
  });
}

// x (rows, heads, dim), row stride given -> y, contiguous.
void miniserve_rms_norm(void* pool, const float* x, long x_stride, long rows, long heads, long dim, const float* weight,
                        float eps, float* y) {
  for_rows(*static_cast<ThreadPool*>(pool), rows, heads * dim, [&](long row) {
    for (long head = 0; head < heads; ++head) {
      const float* in = x + row * x_stride + head * dim;
      float* out = y + (row * heads + head) * dim;
      Floats squares = {};
      long d = 0;
      for (; d + kLanes <= dim; d += kLanes) squares += load(in + d) * load(in + d);
      float total = sum(squares);
      for (; d < dim; ++d) total += in[d] * in[d];
      const float scale = 1.0f / std::sqrt(total / dim + eps);
      for (d = 0; d < dim; ++d) out[d] = in[d] * scale * weight[d];
    }
  });
}

void miniserve_layer_norm(void* pool, const float* x, long x_stride, long rows, long heads, long dim,
                          const float* weight, const float* bias, float eps, float* y) {
  for_rows(*static_cast<ThreadPool*>(pool), rows, heads * dim, [&](long row) {
    for (long head = 0; head < heads; ++head) {
      const float* in = x + row * x_stride + head * dim;
      float* out = y + (row * heads + head) * dim;
      double total = 0, squares = 0;
      for (long d = 0; d < dim; ++d) total += in[d];
      const float mean = static_cast<float>(total / dim);
      for (long d = 0; d < dim; ++d) squares += (in[d] - mean) * (in[d] - mean);
      const float scale = 1.0f / std::sqrt(static_cast<float>(squares / dim) + eps);
      for (long d = 0; d < dim; ++d) out[d] = (in[d] - mean) * scale * weight[d] + bias[d];
    }
  });
}

// x (rows, heads, dim), row stride given -> y, contiguous.
void miniserve_rotate(void* pool, const float* x, long x_stride, long rows, long heads, long dim, const float* cos,
                      const float* sin, long half, float* y) {
  for_rows(*static_cast<ThreadPool*>(pool), rows, heads * dim, [&](long row) {
    for (long head = 0; head < heads; ++head)
      rotate_head(x + row * x_stride + head * dim, dim, cos + row * half, sin + row * half, half,
                  y + (row * heads + head) * dim);
  });
}

void miniserve_write_kv(void* pool, int dtype, const float* k, long k_stride, const float* v, long v_stride, long rows,
                        const int64_t* slots, const float* cos, const float* sin, long half, void* k_memory,
                        void* v_memory, long page_stride, long block_size, long kv_heads, long key_dim,
                        long value_dim) {
  with_dtype(dtype, [&](auto type) {
    typedef decltype(type) T;
    typedef typename T::Stored Stored;
    const Memory<T> memory = {static_cast<Stored*>(k_memory), static_cast<Stored*>(v_memory), page_stride, block_size,
                              kv_heads, key_dim, value_dim};
    write_kv<T>(*static_cast<ThreadPool*>(pool), k, k_stride, v, v_stride, rows, slots, cos, sin, half, memory);
  });
}

void miniserve_attend(void* pool, int dtype, const float* q, long q_stride, long q_heads, void* k_memory,
                      void* v_memory, long page_stride, long block_size, long kv_heads, long key_dim, long value_dim,
                      const int32_t* cu_seqlens_q, const int32_t* seqused_k, long num_requests,
                      const int32_t* block_table, long block_table_width, float scale, long window, float softcap,
                      const float* key_cos, const float* key_sin, long rotary_half, float* out) {
  const Requests requests = {cu_seqlens_q, seqused_k, block_table, num_requests, block_table_width};
  const AttentionOptions options = {scale, window, softcap, key_cos, key_sin, rotary_half};
  with_dtype(dtype, [&](auto type) {
    typedef decltype(type) T;
    typedef typename T::Stored Stored;
    const Memory<T> memory = {static_cast<Stored*>(k_memory), static_cast<Stored*>(v_memory), page_stride, block_size,
                              kv_heads, key_dim, value_dim};
    Attention<T>(q, q_stride, q_heads, memory, requests, options, out).run(*static_cast<ThreadPool*>(pool));
  });
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
