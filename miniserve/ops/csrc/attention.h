// Causal attention over paged K/V, and the writing of K/V.
//
// A page of one layer group, for each KV head, in blocks of 16 slots so that keys come 16 at a time and values
// 16 dimensions at a time (see `simd.h` for the pairs of BFloat16):
//
//     K of a head   block 0: [D / kPack][16 keys][kPack]          block 1: ...   for P / 16 blocks
//     V of a head   block 0: [16 / kPack][D dims][kPack]          block 1: ...
//
// q.k is then 16 scores per step without a sum across lanes, and p.v 16 output dims per step without a transpose.
//
// Int8 K and V have a scale for each token and head, [Hkv][P] in a page. A key's scale multiplies its score, a value's
// its weight: 16 at a time, so that the products run on the stored numbers.
//
// A tile is up to 12 queries that read the same keys: the query heads of one KV head, times as many neighbouring rows
// as fit. Scores come 256 keys at a time; a running maximum and sum make the softmax exact (online softmax, 1805.02867;
// FlashAttention, 2205.14135). The 256 begin at multiples of 256 whatever the tile, so a row's result does not depend
// on its neighbours. (Fewer at a time, and a decoding row spends more time between products than in them.)

#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"
#include "threads.h"

namespace miniserve {

constexpr int kChunk = 256;
constexpr int kBlocks = kChunk / kLanes;
constexpr int kBlocksAhead = 4;  // how far the next keys and values are fetched ahead

// Angles of some rows, or of all positions.
struct Rotation {
  const float *cos, *sin;  // (rows, half)
  long half;

  // RoPE on one head: the first 2 * half dims are rotated in halves (RoFormer, 2104.09864), the rest copied.
  void apply(long row, const float* x, long dim, float* y) const {
    const float *c = cos + row * half, *s = sin + row * half;
    for (long d = 0; d < half; ++d) {
      const float a = x[d], b = x[d + half];
      y[d] = a * c[d] - b * s[d];
      y[d + half] = b * c[d] + a * s[d];
    }
    for (long d = 2 * half; d < dim; ++d) y[d] = x[d];
  }
};

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One layer group's K and V in the arena.
struct Memory {
  void *k, *v;  // of page 0
  long page_stride;  // elements from one page to the next
  long block_size, kv_heads, key_dim, value_dim;
  int dtype;
  float *k_scale, *v_scale;  // of page 0, or null; a page's are `scale_stride` behind those of the page before
  long scale_stride;

  template <class Stored>
  Stored* keys(long page, long head, long slot) const {  // of the block of 16 that holds the slot
    return static_cast<Stored*>(k) + page * page_stride + (head * block_size + slot / kLanes * kLanes) * key_dim;
  }
  template <class Stored>
  Stored* values(long page, long head, long slot) const {
    return static_cast<Stored*>(v) + page * page_stride + (head * block_size + slot / kLanes * kLanes) * value_dim;
  }
  float* scale(float* scales, long page, long head, long slot) const {
    return scales + page * scale_stride + head * block_size + slot;
  }
};

// Keys rotated as they are read may grow by sqrt 2: int8 ones are stored smaller by that.
template <class T>
constexpr float kRotatedRoom = std::is_same<T, WideInt8>::value ? 1.41421356f : 1.0f;

// The step's requests: `batch.py`'s ForwardBatch.
struct Requests {
  const int32_t* cu_seqlens_q;  // (S + 1,)
  const int32_t* seqused_k;  // (S,)
  const int32_t* block_table;  // (S, block_table_width)
  const int64_t* slots;  // (T,): where the rows' own K/V goes
  long count, block_table_width, num_rows;
};

struct AttentionOptions {
  float scale;
  long window;  // 0: none
  float softcap;  // 0: none
  bool diagonal;  // whether a query sees the key of its own position
  const Rotation* rotation;  // of the queries, or null
  const Rotation* key_rotation;  // of all positions, to rotate keys as they are read, or null
};

template <class T>
class Attention {
  typedef typename T::Lhs Lhs;
  typedef typename T::Stored Stored;
  static constexpr bool kScaled = std::is_same<T, WideInt8>::value;

 public:
  Attention(const float* q, long q_stride, long q_heads, const Memory& memory, const Requests& requests,
            const AttentionOptions& options, float* out)
      : q_(q), q_stride_(q_stride), q_heads_(q_heads), memory_(memory), requests_(requests), options_(options),
        out_(out), sharing_(q_heads / memory.kv_heads), heads_per_tile_(std::min<long>(sharing_, kMaxRows)),
        rows_per_tile_(kMaxRows / heads_per_tile_) {}

  void run(ThreadPool& pool) {
    const long head_tiles = (sharing_ + heads_per_tile_ - 1) / heads_per_tile_;
    for (long s = 0; s < requests_.count; ++s) {
      const long rows = requests_.cu_seqlens_q[s + 1] - requests_.cu_seqlens_q[s];
      for (long head = 0; head < memory_.kv_heads; ++head)
        for (long row = 0; row < rows; row += rows_per_tile_)
          for (long h = 0; h < head_tiles; ++h)
            tiles_.push_back({s, head, row, std::min(rows_per_tile_, rows - row), h * heads_per_tile_,
                              std::min(heads_per_tile_, sharing_ - h * heads_per_tile_)});
    }
    const long per_task = std::max<long>(1, std::min<long>(8, tiles_.size() / 64));
    pool.parallel_for((tiles_.size() + per_task - 1) / per_task, [&](long task) {
      for (size_t i = task * per_task; i < std::min<size_t>(tiles_.size(), (task + 1) * per_task); ++i)
        attend(tiles_[i]);
    });
  }

 private:
  struct Tile {
    long request, kv_head, first_row, rows, first_head, heads;
  };

  // Query i of a tile is row i / heads, head i % heads.
  void attend(const Tile& tile) const {
    const int R = static_cast<int>(tile.rows * tile.heads);
    const long key_dim = memory_.key_dim, value_dim = memory_.value_dim;
    const long key_steps = (key_dim + T::kPack - 1) / T::kPack, value_groups = (value_dim + kLanes - 1) / kLanes;
    const long first_row = requests_.cu_seqlens_q[tile.request] + tile.first_row;
    const long num_rows = requests_.cu_seqlens_q[tile.request + 1] - requests_.cu_seqlens_q[tile.request];
    const long first_position = requests_.seqused_k[tile.request] - num_rows + tile.first_row;

    thread_local std::vector<Lhs> queries;
    thread_local std::vector<float> sums, rotated;
    queries.resize(R * key_steps);
    sums.assign(R * value_groups * kLanes, 0.0f);
    rotated.resize(key_dim);
    long last[kMaxRows], first[kMaxRows];  // keys that a query sees
    Floats total[kMaxRows] = {};
    float best[kMaxRows];
    for (int i = 0; i < R; ++i) {
      const long row = first_row + i / tile.heads;
      const long head = tile.kv_head * sharing_ + tile.first_head + i % tile.heads;
      const float* q = q_ + row * q_stride_ + head * key_dim;
      if (options_.rotation) {
        options_.rotation->apply(row, q, key_dim, rotated.data());
        q = rotated.data();
      }
      for (long step = 0; step < key_steps; ++step) queries[i * key_steps + step] = scaled(q, step);
      const long position = first_position + i / tile.heads;
      last[i] = options_.diagonal ? position : position - 1;
      first[i] = options_.window ? std::max<long>(0, position - options_.window + 1) : 0;
      best[i] = kMinusInfinity;
    }

    const long first_chunk = first[0] / kChunk * kChunk;
    thread_local Blocks blocks;
    find_blocks(tile, first[0], last[R - 1], first_chunk, blocks);
    alignas(64) float scores[kMaxRows][kChunk];
    Lhs weights[kMaxRows][kChunk / T::kPack];
    for (long chunk = first_chunk; chunk <= last[R - 1]; chunk += kChunk) {
      // Blocks of 16 that no query sees are not touched: their pages may be given back already.
      const Span span = {chunk, (chunk - first_chunk) / kLanes,
                         static_cast<int>(std::max<long>(0, first[0] / kLanes - chunk / kLanes)),
                         static_cast<int>(std::min<long>(kBlocks, last[R - 1] / kLanes - chunk / kLanes + 1))};
      if (span.begin >= span.end) continue;  // a window of 1 without the diagonal sees nothing
      score(R, blocks, span, queries.data(), key_steps, scores);
      alignas(64) float rescale[kLanes];
      if (kScaled) scale_scores(R, blocks, span, scores);
      softmax_step(R, span, first, last, scores, best, total, rescale);
      if (kScaled) scale_weights(R, blocks, span, scores);
      for (int i = 0; i < R; ++i) {
        if (rescale[i] != 1.0f)
          for (long g = 0; g < value_groups; ++g) {
            float* sum = &sums[(i * value_groups + g) * kLanes];
            store(sum, load(sum) * rescale[i]);
          }
        for (int step = span.begin * kLanes / T::kPack; step < span.end * kLanes / T::kPack; ++step)
          weights[i][step] = T::lhs(scores[i] + step * T::kPack);
      }
      add_values(R, blocks, span, &weights[0][0], std::min(last[R - 1] + 1, chunk + kChunk), sums.data(), value_groups);
    }

    for (int i = 0; i < R; ++i) {
      const long row = first_row + i / tile.heads;
      const long head = tile.kv_head * sharing_ + tile.first_head + i % tile.heads;
      float* out = out_ + (row * q_heads_ + head) * value_dim;
      const float weight = sum(total[i]), inverse = weight > 0 ? 1.0f / weight : 0;  // 0: no key was seen
      for (long d = 0; d < value_dim; ++d) out[d] = sums[i * value_groups * kLanes + d] * inverse;
    }
  }

  Lhs scaled(const float* q, long step) const {
    float pack[T::kPack] = {};
    for (int i = 0; i < T::kPack && step * T::kPack + i < memory_.key_dim; ++i)
      pack[i] = q[step * T::kPack + i] * options_.scale;
    return T::lhs(pack);
  }

  // The blocks of 16 that a tile reads, from its first chunk on. Behind the last one it is repeated, as what would be
  // fetched next.
  struct Blocks {
    std::vector<const Stored*> keys, values;
    std::vector<const float*> key_scales, value_scales;  // of int8
  };

  // A chunk: its first key, that key's block in `Blocks`, and which of its blocks are seen.
  struct Span {
    long chunk, block;
    int begin, end;
  };

  void find_blocks(const Tile& tile, long first_key, long last_key, long first_chunk, Blocks& blocks) const {
    const int32_t* pages = requests_.block_table + tile.request * requests_.block_table_width;
    const long count = last_key < 0 ? 0 : (last_key - first_chunk) / kLanes + 1, head = tile.kv_head;
    for (auto* pointers : {&blocks.keys, &blocks.values}) pointers->resize(count + kBlocksAhead);
    for (auto* scales : {&blocks.key_scales, &blocks.value_scales}) scales->resize(kScaled ? count : 0);
    long block = (first_key - first_chunk) / kLanes, position = first_chunk + block * kLanes;
    long index = position / memory_.block_size, slot = position % memory_.block_size;
    for (; block < count; ++block) {
      const long page = pages[index];
      blocks.keys[block] = memory_.keys<Stored>(page, head, slot);
      blocks.values[block] = memory_.values<Stored>(page, head, slot);
      if (kScaled) {
        blocks.key_scales[block] = memory_.scale(memory_.k_scale, page, head, slot);
        blocks.value_scales[block] = memory_.scale(memory_.v_scale, page, head, slot);
      }
      slot += kLanes;
      if (slot == memory_.block_size) slot = 0, ++index;
    }
    for (auto* pointers : {&blocks.keys, &blocks.values})
      if (count) std::fill(pointers->begin() + count, pointers->end(), (*pointers)[count - 1]);
  }

  // scores[i][j] = q_i . k_(chunk + j), 16 keys a group.
  void score(int rows, const Blocks& blocks, const Span& span, const Lhs* queries, long key_steps,
             float (*scores)[kChunk]) const {
    const Stored* const* keys = &blocks.keys[span.block];
    const Stored* const* next = keys + kBlocksAhead;
    const Stored* rotated[kBlocks];
    thread_local std::vector<Stored> copies[kBlocks];
    if (options_.key_rotation) {
      for (int b = span.begin; b < span.end; ++b)
        rotated[b] = rotate_keys(keys[b], span.chunk + b * kLanes, copies[b]);
      keys = rotated;
    }
    const Rhs<T> rhs = {keys + span.begin, next + span.begin, span.end - span.begin, 1, 0, kLanes * T::kPack, key_steps};
    dot_rows<T, false>(rows, queries, key_steps, rhs, scores[0] + span.begin * kLanes, kChunk);
  }

  void scale_scores(int rows, const Blocks& blocks, const Span& span, float (*scores)[kChunk]) const {
    const float room = options_.key_rotation ? kRotatedRoom<T> : 1.0f;
    for (int b = span.begin; b < span.end; ++b) {
      const Floats scale = room * load(blocks.key_scales[span.block + b]);
      for (int i = 0; i < rows; ++i) store(scores[i] + b * kLanes, load(scores[i] + b * kLanes) * scale);
    }
  }

  void scale_weights(int rows, const Blocks& blocks, const Span& span, float (*weights)[kChunk]) const {
    for (int b = span.begin; b < span.end; ++b) {
      const Floats scale = load(blocks.value_scales[span.block + b]);
      for (int i = 0; i < rows; ++i) {
        const Floats p = load(weights[i] + b * kLanes);  // 0 where no key is, and then the scale may be anything
        store(weights[i] + b * kLanes, p > 0 ? p * scale : Floats{});
      }
    }
  }

  // One step of the online softmax: scores become weights; what earlier sums must be multiplied by goes to `rescale`.
  void softmax_step(int rows, const Span& span, const long* first, const long* last, float (*scores)[kChunk],
                    float* best, Floats* total, float* rescale) const {
    const int begin = span.begin, end = span.end;
    alignas(64) float change[kLanes] = {};
    for (int i = 0; i < rows; ++i) {
      if (options_.softcap > 0)
        for (int b = begin; b < end; ++b) {
          float* s = scores[i] + b * kLanes;
          store(s, options_.softcap * tanh(load(s) / options_.softcap));
        }
      if (first[i] > span.chunk + begin * kLanes || last[i] < span.chunk + end * kLanes - 1)
        mask(scores[i], begin, end, first[i] - span.chunk, last[i] - span.chunk);
      Floats peak = load(scores[i] + begin * kLanes);
      for (int b = begin + 1; b < end; ++b) peak = max(peak, load(scores[i] + b * kLanes));
      const float new_best = std::max(best[i], max(peak));
      change[i] = new_best == kMinusInfinity ? 0 : best[i] - new_best;  // no key seen yet: there is nothing to rescale
      best[i] = new_best;
    }
    store(rescale, exp(load(change)));  // of all rows at once
    for (int i = 0; i < rows; ++i) {
      const float base = best[i] == kMinusInfinity ? 0 : best[i];
      total[i] *= rescale[i];
      for (int b = begin; b < end; ++b) {
        float* s = scores[i] + b * kLanes;
        const Floats p = exp(load(s) - base);
        store(s, p);
        total[i] += p;
      }
    }
  }

  // Keys before `first` and behind `last` get no weight. Behind the last key there may be anything, NaN too: it is
  // replaced, not added to.
  void mask(float* scores, int begin, int end, long first, long last) const {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int from = static_cast<int>(std::max<long>(first, 0)), to = static_cast<int>(std::min<long>(last, kChunk));
    for (int b = begin; b < end; ++b) {
      const Ints key = lane + b * kLanes, visible = (key >= from) & (key <= to);
      store(scores + b * kLanes, visible ? load(scores + b * kLanes) : splat(kMinusInfinity));
    }
  }

  // sums[i] += sum over keys of weights[i][key] * v_key, 16 dims a group. Whole blocks at once, as long as all of their
  // keys are there: values behind the last key may be NaN, and 0 * NaN is NaN (`write_kv` clears a pair's other half).
  void add_values(int rows, const Blocks& blocks, const Span& span, const Lhs* weights, long stop_key, float* sums,
                  long groups) const {
    const int full = std::min<int>(span.end, static_cast<int>((stop_key - span.chunk) / kLanes));
    if (span.begin < full) add_blocks(rows, blocks, span.block, weights, span.begin, full, kLanes / T::kPack, sums, groups);
    if (full < span.end)
      add_blocks(rows, blocks, span.block, weights, full, span.end,
                 (stop_key - span.chunk - full * kLanes + T::kPack - 1) / T::kPack, sums, groups);
  }

  void add_blocks(int rows, const Blocks& blocks, long block, const Lhs* weights, int begin, int end, long steps,
                  float* sums, long groups) const {
    const int whole = static_cast<int>(memory_.value_dim / kLanes), segments = end - begin;
    const Stored* const* values = &blocks.values[block + begin];
    const Lhs* p = weights + begin * kLanes / T::kPack;
    const Rhs<T> rhs = {values, values + kBlocksAhead, whole, segments, kLanes * T::kPack, memory_.value_dim * T::kPack,
                        steps};
    dot_rows<T, true>(rows, p, kChunk / T::kPack, rhs, sums, groups * kLanes);
    if (whole < groups) {  // the last dims of a head size that is no multiple of 16
      Stored padded[kBlocks][kLanes / T::kPack][kLanes * T::kPack];
      const Stored* w[kBlocks];
      for (int b = 0; b < segments; ++b) w[b] = pad_values(values[b], whole, steps, padded[b]);
      const Rhs<T> rest = {w, w, 1, segments, kLanes * T::kPack, kLanes * T::kPack, steps};
      dot_rows<T, true>(rows, p, kChunk / T::kPack, rest, sums + whole * kLanes, groups * kLanes);
    }
  }

  const Stored* pad_values(const Stored* values, long group, long steps,
                           Stored (*padded)[kLanes * T::kPack]) const {
    const size_t bytes = (memory_.value_dim - group * kLanes) * T::kPack * sizeof(Stored);
    std::memset(padded, 0, kLanes / T::kPack * sizeof padded[0]);
    for (long step = 0; step < steps; ++step)
      std::memcpy(padded[step], values + (step * memory_.value_dim + group * kLanes) * T::kPack, bytes);
    return padded[0];
  }

  // A block of 16 keys with RoPE applied, for keys that are stored without it (MLKV's owners).
  const Stored* rotate_keys(const Stored* keys, long position, std::vector<Stored>& out) const {
    const Rotation& angles = *options_.key_rotation;
    const long half = angles.half;
    const auto at = [&](long d, long lane) { return (d / T::kPack * kLanes + lane) * T::kPack + d % T::kPack; };
    out.assign(keys, keys + memory_.key_dim * kLanes);
    for (long lane = 0; lane < kLanes; ++lane) {
      const float* cos = angles.cos + (position + lane) * half;
      const float* sin = angles.sin + (position + lane) * half;
      for (long d = 0; d < half; ++d) {
        const float a = T::widen(keys[at(d, lane)]), b = T::widen(keys[at(d + half, lane)]);
        out[at(d, lane)] = T::round((a * cos[d] - b * sin[d]) / kRotatedRoom<T>);
        out[at(d + half, lane)] = T::round((b * cos[d] + a * sin[d]) / kRotatedRoom<T>);
      }
      if (kRotatedRoom<T> > 1)
        for (long d = 2 * half; d < memory_.key_dim; ++d)
          out[at(d, lane)] = T::round(T::widen(keys[at(d, lane)]) / kRotatedRoom<T>);
    }
    return out.data();
  }

  const float* q_;
  long q_stride_, q_heads_;
  const Memory& memory_;
  const Requests& requests_;
  const AttentionOptions& options_;
  float* out_;
  long sharing_, heads_per_tile_, rows_per_tile_;
  std::vector<Tile> tiles_;
};

// The scale that brings the largest of some numbers to 127; returns its inverse.
inline float write_scale(const float* x, long dim, float* scale) {
  float largest = 0;
  for (long d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(x[d]));
  *scale = largest / 127.0f;
  return largest > 0 ? 127.0f / largest : 0;
}

// Rotate (unless `rotation` is null) and write the K/V of some rows to their slots; k (rows, kv_heads, key_dim).
template <class T>
void write_kv(ThreadPool& pool, const float* k, long k_stride, const float* v, long v_stride, const Requests& requests,
              const Rotation* rotation, const Memory& memory) {
  typedef typename T::Stored Stored;
  const long rows_per_task = 8;
  pool.parallel_for((requests.num_rows + rows_per_task - 1) / rows_per_task, [&](long task) {
    std::vector<float> rotated(memory.key_dim);
    for (long row = task * rows_per_task; row < std::min(requests.num_rows, (task + 1) * rows_per_task); ++row) {
      const long page = requests.slots[row] / memory.block_size, slot = requests.slots[row] % memory.block_size;
      const long lane = slot % kLanes, step = lane / T::kPack, part = lane % T::kPack;
      // The other half of a pair holds nothing yet, unless the next row, of the same request, brings it.
      const bool next_is_neighbour = row + 1 < requests.num_rows && requests.slots[row + 1] == requests.slots[row] + 1;
      const bool clear = T::kPack == 2 && part == 0 && !next_is_neighbour;  // a byte is never NaN
      for (long head = 0; head < memory.kv_heads; ++head) {
        const float* key = k + row * k_stride + head * memory.key_dim;
        const float* value = v + row * v_stride + head * memory.value_dim;
        if (rotation) {
          rotation->apply(row, key, memory.key_dim, rotated.data());
          key = rotated.data();
        }
        float key_inverse = 1, value_inverse = 1;
        if (memory.k_scale) {
          key_inverse = write_scale(key, memory.key_dim, memory.scale(memory.k_scale, page, head, slot));
          value_inverse = write_scale(value, memory.value_dim, memory.scale(memory.v_scale, page, head, slot));
        }
        Stored* keys = memory.keys<Stored>(page, head, slot);
        for (long d = 0; d < memory.key_dim; ++d)
          keys[(d / T::kPack * kLanes + lane) * T::kPack + d % T::kPack] = T::round(key[d] * key_inverse);
        Stored* values = memory.values<Stored>(page, head, slot) + step * memory.value_dim * T::kPack;
        for (long d = 0; d < memory.value_dim; ++d) values[d * T::kPack + part] = T::round(value[d] * value_inverse);
        if (clear)
          for (long d = 0; d < memory.value_dim; ++d) values[d * T::kPack + part + 1] = 0;
      }
    }
  });
}

}  // namespace miniserve
