// x W^T with an epilogue, W packed once at loading.
//
//     W (N, K) in panels of 32 outputs:     panel 0   k=0: w0 .. w31   k=1: w0 .. w31   ...   (Float32)
//                                                     k=0,1: w0 w0' .. w31 w31'        ...   (BFloat16)
//                                           panel 1   ...
//
// A panel is read front to back for each tile of up to 12 rows, so that one row costs the panel's bytes and many
// rows the FLOPs. For a gated product the panel holds 16 gates beside their 16 ups, so that act(gate) * up is an
// epilogue of the tile. Outputs behind N are zero weights; their results are not stored.

#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace miniserve {

constexpr int kPanel = 2 * kLanes;

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

// Where a tile's sums go: y = act(sum + bias) + residual, or act(gate + bias) * (up + bias).
struct Epilogue {
  const float* bias;  // (N,) in panel order, or null
  const float* residual;  // (T, N), or null
  long residual_stride;
  Activation activation;
  bool gated;
  float* y;
  long y_stride;
  long num_outputs;  // columns of y

  void store(long row, long panel, const float* tile) const {
    Floats low = load(tile), high = load(tile + kLanes);
    if (bias) {
      low += load(bias + panel * kPanel);
      high += load(bias + panel * kPanel + kLanes);
    }
    if (gated) {
      put(row, panel * kLanes, activate(low, activation) * high);
    } else {
      put(row, panel * kPanel, activate(low, activation));
      put(row, panel * kPanel + kLanes, activate(high, activation));
    }
  }

 private:
  void put(long row, long column, Floats value) const {
    float* out = y + row * y_stride + column;
    const float* add = residual ? residual + row * residual_stride + column : nullptr;
    long count = std::min<long>(kLanes, num_outputs - column);
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

 public:
  Matmul(const float* x, long x_stride, long rows, long inputs, const Stored* packed, long num_panels,
         const Epilogue& epilogue)
      : x_(x), x_stride_(x_stride), rows_(rows), inputs_(inputs), packed_(packed), num_panels_(num_panels),
        epilogue_(epilogue), steps_((inputs + T::kPack - 1) / T::kPack), lhs_stride_(steps_ + 8) {}

  void run(ThreadPool& pool) {
    // The activations of a chunk stay in L2 while the weights stream past them.
    const long chunk = std::max<long>(kMaxRows, (512 << 10) / (lhs_stride_ * sizeof(Lhs)) / kMaxRows * kMaxRows);
    lhs_.resize(std::min(rows_, chunk) * lhs_stride_);
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
    const long per_task = (num_panels_ / 64 / panels_at_once + 1) * panels_at_once;
    pool.parallel_for((num_panels_ + per_task - 1) / per_task, [&](long task) {
      const long stop = std::min(num_panels_, (task + 1) * per_task);
      for (long panel = task * per_task; panel < stop; panel += panels_at_once)
        for (long tile = 0; tile < tiles.count; ++tile)
          run_tile(first_row, tiles.first(tile), tiles.height(tile), panel, std::min(stop, panel + panels_at_once));
    });
  }

  void run_tile(long first_row, long slot, int rows, long panel, long stop) const {
    const long panel_size = steps_ * kPanel * T::kPack;
    const Stored* w[4];
    const int groups = static_cast<int>(stop - panel) * 2;
    for (int g = 0; g < groups; ++g) w[g] = packed_ + (panel + g / 2) * panel_size + g % 2 * kLanes * T::kPack;
    alignas(64) float sums[kMaxRows][2 * kPanel] = {};
    dot_rows<T>(rows, groups, lhs_.data() + slot * lhs_stride_, lhs_stride_, w, kPanel * T::kPack, steps_, sums[0],
                2 * kPanel);
    for (int r = 0; r < rows; ++r)
      for (long p = panel; p < stop; ++p) epilogue_.store(first_row + slot + r, p, sums[r] + (p - panel) * kPanel);
  }

  void convert(long row, long slot) {
    const float* x = x_ + row * x_stride_;
    Lhs* out = lhs_.data() + slot * lhs_stride_;
    for (long step = 0; step < inputs_ / T::kPack; ++step) out[step] = T::lhs(x + step * T::kPack);
    if (inputs_ % T::kPack) {
      float last[T::kPack] = {x[inputs_ - 1]};
      out[steps_ - 1] = T::lhs(last);
    }
  }

  const float* x_;
  long x_stride_, rows_, inputs_;
  const Stored* packed_;
  long num_panels_;
  const Epilogue& epilogue_;
  long steps_, lhs_stride_;
  std::vector<Lhs> lhs_;
};

}  // namespace miniserve
