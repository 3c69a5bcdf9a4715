// x W^T with an epilogue, W packed once at loading.
//
//     W (N, K) in panels of 32 outputs:     panel 0   k=0: w0 .. w31   k=1: w0 .. w31   ...   (Float32)
//                                                     k=0,1: w0 w0' .. w31 w31'        ...   (BFloat16)
//                                           panel 1   ...
//
// A panel is read front to back for each tile of up to 12 rows, so that one row costs the panel's bytes and many
// rows the FLOPs. For a gated product the panel holds 16 gates beside their 16 ups, so that act(gate) * up is an
// epilogue of the tile. Outputs behind N are zero weights; their results are not stored.
//
// Int8: a weight is its output's scale times a whole number, fixed when it is packed; an activation is its row's
// scale times a whole number, found as the row comes. Both scales are the largest magnitude over 127.

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace miniserve {

constexpr int kPanel = 2 * kLanes;
constexpr long kPrefetch = 3072;  // bytes ahead; hides DRAM when few rows leave the arithmetic waiting for weights

enum Activation { kNone, kSilu, kGelu, kGeluTanh };

inline Floats activate(Floats x, Activation kind) {
  switch (kind) {
    case kSilu:
      return x / (1.0f + exp(-x));
    case kGelu: {
      Floats y;
      for (int i = 0; i < kLanes; ++i) y[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
      return y;
    }
    case kGeluTanh:
      return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
    default:
      return x;
  }
}

// A packed weight with its bias: `cpu.py`'s Packed.
struct Weight {
  const void* panels;
  const float* scales;  // (N,) in panel order for Int8, else null
  const float* bias;  // (N,) in panel order, or null
  long num_panels, inputs, outputs;
  int dtype, gated;
};

// What happens to a row before the product: RMSNorm (1910.07467), or nothing if `weight` is null.
struct Norm {
  const float* weight;
  float eps;

  void apply(const float* x, long dim, float* y) const {
    Floats squares = {};
    long d = 0;
    for (; d + kLanes <= dim; d += kLanes) squares += load(x + d) * load(x + d);
    float total = sum(squares);
    for (; d < dim; ++d) total += x[d] * x[d];
    const float scale = 1.0f / std::sqrt(total / dim + eps);
    for (d = 0; d < dim; ++d) y[d] = x[d] * scale * weight[d];
  }
};

// Where a tile's sums go: y = act(sum + bias) + residual, or act(gate + bias) * (up + bias).
struct Epilogue {
  const Weight& weight;
  const float* residual;  // (T, N), or null
  long residual_stride;
  Activation activation;
  float* y;  // (T, N)

  template <class Sum>
  void store(long row, long panel, const Sum* tile, float row_scale) const {
    Floats low = to_floats(load(tile)), high = to_floats(load(tile + kLanes));
    if (weight.scales) {
      low *= load(weight.scales + panel * kPanel) * row_scale;
      high *= load(weight.scales + panel * kPanel + kLanes) * row_scale;
    }
    if (weight.bias) {
      low += load(weight.bias + panel * kPanel);
      high += load(weight.bias + panel * kPanel + kLanes);
    }
    if (weight.gated) {
      put(row, panel * kLanes, activate(low, activation) * high);
    } else {
      put(row, panel * kPanel, activate(low, activation));
      put(row, panel * kPanel + kLanes, activate(high, activation));
    }
  }

 private:
  void put(long row, long column, Floats value) const {
    float* out = y + row * weight.outputs + column;
    const float* add = residual ? residual + row * residual_stride + column : nullptr;
    const long count = std::min<long>(kLanes, weight.outputs - column);
    if (count == kLanes) {
      miniserve::store(out, add ? load(add) + value : value);
    } else {
      for (long i = 0; i < count; ++i) out[i] = add ? add[i] + value[i] : value[i];
    }
  }
};

// Rows cut into tiles of nearly equal height: 65 rows are 5 tiles of 11 and one of 10, not 5 of 12 and one of 5.
struct RowTiles {
  long rows, count;

  explicit RowTiles(long num_rows) : rows(num_rows), count((num_rows + kMaxRows - 1) / kMaxRows) {}
  long first(long tile) const { return tile * rows / count; }
  int height(long tile) const { return static_cast<int>(first(tile + 1) - first(tile)); }
};

template <class T>
class Matmul {
  typedef typename T::Lhs Lhs;
  typedef typename T::Stored Stored;
  typedef typename T::Sum Sum;

 public:
  Matmul(const Weight& weight, const float* x, long x_stride, long rows, const Norm& norm, const Epilogue& epilogue)
      : weight_(weight), x_(x), x_stride_(x_stride), rows_(rows), norm_(norm), epilogue_(epilogue),
        steps_((weight.inputs + T::kPack - 1) / T::kPack), lhs_stride_(steps_ + 8) {}

  void run(ThreadPool& pool) {
    // The activations of a chunk stay in L2 while the weights stream past them.
    const long chunk = std::max<long>(kMaxRows, (512 << 10) / (lhs_stride_ * sizeof(Lhs)) / kMaxRows * kMaxRows);
    lhs_.resize(std::min(rows_, chunk) * lhs_stride_);
    scales_.assign(std::min(rows_, chunk), 1.0f);
    starts_.assign(std::min(rows_, chunk), 0);
    for (long first = 0; first < rows_; first += chunk) run_chunk(pool, first, std::min(chunk, rows_ - first));
  }

 private:
  void run_chunk(ThreadPool& pool, long first_row, long num_rows) {
    pool.parallel_for((num_rows + 15) / 16, [&](long task) {
      for (long row = task * 16; row < std::min(num_rows, task * 16 + 16); ++row) convert(first_row + row, row);
    });
    const RowTiles tiles(num_rows);
    // Few rows: two panels at once, since only many outputs keep the loads busy.
    const long panels_at_once = groups_for(tiles.height(0)) == 4 ? 2 : 1;
    const long per_task = (weight_.num_panels / 64 / panels_at_once + 1) * panels_at_once;
    pool.parallel_for((weight_.num_panels + per_task - 1) / per_task, [&](long task) {
      const long stop = std::min(weight_.num_panels, (task + 1) * per_task);
      for (long panel = task * per_task; panel < stop; panel += panels_at_once)
        for (long tile = 0; tile < tiles.count; ++tile)
          run_tile(first_row, tiles.first(tile), tiles.height(tile), panel, std::min(stop, panel + panels_at_once));
    });
  }

  const Stored* packed(long panel) const {
    return static_cast<const Stored*>(weight_.panels) + panel * steps_ * kPanel * T::kPack;
  }

  void run_tile(long first_row, long slot, int rows, long panel, long stop) const {
    const Stored *w[4], *next[4];
    const int groups = static_cast<int>(stop - panel) * 2;
    for (int g = 0; g < groups; ++g) {
      w[g] = packed(panel + g / 2) + g % 2 * kLanes * T::kPack;
      next[g] = w[g] + kPrefetch / sizeof(Stored);
    }
    alignas(64) Sum sums[kMaxRows][2 * kPanel];
    for (int r = 0; r < rows; ++r) std::fill_n(sums[r], 2 * kPanel, starts_[slot + r]);
    const Rhs<T> rhs = {w, next, groups, 1, 0, kPanel * T::kPack, steps_};
    dot_rows<T, true>(rows, lhs_.data() + slot * lhs_stride_, lhs_stride_, rhs, sums[0], 2 * kPanel);
    for (int r = 0; r < rows; ++r)
      for (long p = panel; p < stop; ++p)
        epilogue_.store(first_row + slot + r, p, sums[r] + (p - panel) * kPanel, scales_[slot + r]);
  }

  // A row as the micro-kernel wants it: normed, for Int8 quantised, in packs.
  void convert(long row, long slot) {
    thread_local std::vector<float> normed, whole;
    const long inputs = weight_.inputs;
    const float* x = x_ + row * x_stride_;
    Lhs* out = lhs_.data() + slot * lhs_stride_;
    if (norm_.weight) {
      normed.resize(inputs);
      norm_.apply(x, inputs, normed.data());
      x = normed.data();
    }
    if constexpr (std::is_same<T, Int8>()) {
      whole.resize(inputs);
      quantise(x, slot, whole.data());
      x = whole.data();
    }
    for (long step = 0; step < inputs / T::kPack; ++step) out[step] = T::lhs(x + step * T::kPack);
    if (const long rest = inputs % T::kPack) {
      float last[T::kPack] = {};
      std::copy_n(x + inputs - rest, rest, last);
      out[steps_ - 1] = T::lhs(last);
    }
  }

  // A row as whole numbers; its scale is kept. A row that is not finite becomes NaN by its scale.
  void quantise(const float* x, long slot, float* whole) {
    float largest = 0, sum = 0;
    bool finite = true;
    for (long i = 0; i < weight_.inputs; ++i) {
      largest = std::max(largest, std::fabs(x[i]));
      finite &= std::fabs(x[i]) <= std::numeric_limits<float>::max();
    }
    const float inverse = finite && largest > 0 ? 127.0f / largest : 0;
    for (long i = 0; i < weight_.inputs; ++i) sum += whole[i] = finite ? std::nearbyint(x[i] * inverse) : 0;
    scales_[slot] = finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    starts_[slot] = T::start(sum);
  }

  const Weight& weight_;
  const float* x_;
  long x_stride_, rows_;
  const Norm& norm_;
  const Epilogue& epilogue_;
  long steps_, lhs_stride_;
  std::vector<Lhs> lhs_;  // of the rows of a chunk
  std::vector<float> scales_;
  std::vector<Sum> starts_;
};

}  // namespace miniserve
