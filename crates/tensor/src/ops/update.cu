// Optimizer steps over a whole model in one launch; the formulas are those of update.rs.
//
// The model is an array of Targets, and a list of blocks: block i works on elements chunk 4096 .. of tensor
// blocks[i].tensor (of its kept elements where its mask is places), a tensor's blocks standing together and in order.
// Everything here is independent of T: a weight is f32 without a master, bf16 with one; a gradient is f32 or, where
// flag 1 is set, bf16; states are f32 or, where flag 32 is set, bf16, rounded at random as rounding.rs does. All kernels but the last: grid = the number of blocks, block 256.
//
// update_sgd, update_momentum, update_adam(targets, blocks, settings)
// update_lars, update_lamb(targets, blocks, settings, norms)
//   m is momentum's velocity and Adam's first moment, v Adam's second. norms: double2 [tensors] = |w|^2 and |g|^2
//   (LARS, without the gradient's scale) or |u|^2 (LAMB), over the whole layer: the caller adds up its shards.
//   The trust ratio is 1 for a target without flag 2.
// update_norms(targets, blocks, settings, kind, partial): double2 [blocks]; kind 0: (0, |g|^2), 1: LARS, 2: LAMB,
//   with m and v as they are before the step.
// update_norms_total(partial, first, norms): norms: double2 [tensors], tensor i having the blocks first[i] ..
//   first[i + 1]; first: u32 [tensors + 1]. grid tensors, block 1024. With first = {0, blocks} it is the norm of the
//   whole model, which clipping wants.

// See rounding.rs; read where flag 32 is set.
struct Rounding {
    u64 key;    // of this step
    i64 first;  // the number of the target's first element
    i64 count;  // elements of the target
    i64 row;    // 0 where the shard is the full tensor
    i64 full_row;
    i64 end[3];
    i64 shift[3];
};

struct Target {
    void* weight;
    void* master;  // f32, or where flag 4 is set the 16 low bits that the bf16 weight lost
    const void* gradient;
    void* m;
    void* v;
    Mask mask;  // no words and no places where all weights are kept
    float decay;
    u32 flags;
    Rounding rounding;
};

struct Block {
    u32 tensor;
    u32 chunk;
};

// Those a step does not name are ignored.
struct Settings {
    float lr;
    float gradient_scale;
    float momentum;
    float beta1;
    float beta2;
    float eps;
    float unbias1;  // 1 / (1 - beta1^step)
    float unbias2;  // 1 / sqrt(1 - beta2^step)
    float trust;
    float max_norm;
    u32 nesterov;
    u32 decoupled;
    u32 rate_outside;  // of LARS' velocity
};

enum : u32 {
    NARROW_GRADIENT = 1,
    ADAPT = 2,
    LOW_BITS = 4,
    COMPRESSED = 8,
    COMPRESSED_WEIGHT = 16,
    NARROW_STATES = 32,
    KEPT_VALUES = 64,
};

// The nearest bf16, ties away from zero, so that `join` can tell a number from its rounding and its low half.
DEVICE u16 nearest(float x) { return static_cast<u16>((__float_as_uint(x) + 0x8000u) >> 16); }

DEVICE float join(u16 weight, u16 low) {
    const u16 upper = weight - (low >> 15);
    return __uint_as_float(static_cast<u32>(upper) << 16 | low);
}

// The exact weight at `place`; what stands beside it stands at `at`.
DEVICE float exact(const Target& t, i64 place, i64 at) {
    if (!t.master) return static_cast<const float*>(t.weight)[place];
    if (!(t.flags & LOW_BITS)) return static_cast<const float*>(t.master)[at];
    return join(static_cast<const u16*>(t.weight)[place], static_cast<const u16*>(t.master)[at]);
}

DEVICE void put_exact(const Target& t, i64 place, i64 at, float w) {
    if (!t.master) {
        static_cast<float*>(t.weight)[place] = w;
        return;
    }
    static_cast<u16*>(t.weight)[place] = nearest(w);
    if (t.flags & LOW_BITS)
        static_cast<u16*>(t.master)[at] = static_cast<u16>(__float_as_uint(w));
    else
        static_cast<float*>(t.master)[at] = w;
}

// Where an element of the shard stands in the full tensor.
DEVICE u64 in_full(const Rounding& r, i64 at) {
    if (r.row == 0) return at;
    // A division of 64 bits costs more than all else.
    const i64 outer = (at | r.row) >> 32 ? at / r.row : static_cast<u32>(at) / static_cast<u32>(r.row);
    const i64 rest = at - outer * r.row;
    return outer * r.full_row + rest + (rest < r.end[0] ? r.shift[0] : rest < r.end[1] ? r.shift[1] : r.shift[2]);
}

// One of the two bf16 numbers around x, by 16 random bits.
DEVICE u16 stochastic(float x, u32 bits) { return static_cast<u16>((__float_as_uint(x) + (bits & 0xffffu)) >> 16); }

DEVICE float state_at(const Target& t, const void* state, i64 at) {
    if (t.flags & NARROW_STATES) return __uint_as_float(static_cast<u32>(static_cast<const u16*>(state)[at]) << 16);
    return static_cast<const float*>(state)[at];
}

// Four states that stand side by side.
DEVICE void load_states(const Target& t, const void* state, i64 at, float (&x)[4]) {
    if (t.flags & NARROW_STATES)
        load(static_cast<const bf16*>(state) + at, x);
    else
        load(static_cast<const float*>(state) + at, x);
}

// Writes the states of the element at `position` of the shard.
template <int STATES>
DEVICE void put_states(const Target& t, i64 at, i64 position, float m, float v) {
    if (STATES < 1) return;
    if (t.flags & NARROW_STATES) {
        const u32 bits = random_bits(t.rounding.key, in_full(t.rounding, position));
        static_cast<u16*>(t.m)[at] = stochastic(m, bits);
        if (STATES > 1) static_cast<u16*>(t.v)[at] = stochastic(v, bits >> 16);
    } else {
        static_cast<float*>(t.m)[at] = m;
        if (STATES > 1) static_cast<float*>(t.v)[at] = v;
    }
}

// Four that stand side by side, here and in the shard.
template <int STATES>
DEVICE void store_states(const Target& t, i64 at, i64 position, const float (&m)[4], const float (&v)[4]) {
    if (STATES < 1) return;
    if (t.flags & NARROW_STATES) {
        u32 bits[4];
        for (int k = 0; k < 4; ++k) bits[k] = random_bits(t.rounding.key, in_full(t.rounding, position + k));
        const auto two = [&](const float* x, int k, int by) {
            return stochastic(x[k], bits[k] >> by) | static_cast<u32>(stochastic(x[k + 1], bits[k + 1] >> by)) << 16;
        };
        *reinterpret_cast<uint2*>(static_cast<u16*>(t.m) + at) = make_uint2(two(m, 0, 0), two(m, 2, 0));
        if (STATES > 1) *reinterpret_cast<uint2*>(static_cast<u16*>(t.v) + at) = make_uint2(two(v, 0, 16), two(v, 2, 16));
    } else {
        store(static_cast<float*>(t.m) + at, m);
        if (STATES > 1) store(static_cast<float*>(t.v) + at, v);
    }
}

// Runs body(w, g, m, v) over one element: its weight is at `place`, what stands beside it at `at`, and its number in the shard is
// `position`. STATES: -1 reads the gradient alone, 0 the weight too, 1 also m, 2 also v;
// where WRITE, all of these but the gradient are written back.
template <int STATES, bool WRITE, class G, class Body>
DEVICE void over_one(const Target& t, i64 place, i64 at, i64 position, Body body) {
    float w = 0.0f, m = 0.0f, v = 0.0f;
    if (STATES >= 0) w = exact(t, place, at);
    if (STATES > 0) m = state_at(t, t.m, at);
    if (STATES > 1) v = state_at(t, t.v, at);
    body(w, to_f32(static_cast<const G*>(t.gradient)[at]), m, v);
    if (!WRITE) return;
    put_exact(t, place, at, w);
    put_states<STATES>(t, at, position, m, v);
}

// Four elements that stand side by side, with their weights as exact numbers.
template <int STATES, class G>
struct Four {
    float w[4], g[4], m[4], v[4];

    DEVICE void read(const Target& t, i64 i) {
        if (STATES >= 0) {
            if (t.flags & LOW_BITS) {
                const uint2 high = *reinterpret_cast<const uint2*>(static_cast<const u16*>(t.weight) + i);
                const uint2 low = *reinterpret_cast<const uint2*>(static_cast<const u16*>(t.master) + i);
                w[0] = join(high.x, low.x), w[1] = join(high.x >> 16, low.x >> 16);
                w[2] = join(high.y, low.y), w[3] = join(high.y >> 16, low.y >> 16);
            } else {
                load(static_cast<const float*>(t.master ? t.master : t.weight) + i, w);
            }
        }
        load(static_cast<const G*>(t.gradient) + i, g);
        if (STATES > 0) load_states(t, t.m, i, m);
        if (STATES > 1) load_states(t, t.v, i, v);
    }

    DEVICE void write(const Target& t, i64 i, i64 position) const {
        const auto two = [](u32 first, u32 second) { return (first & 0xffffu) | second << 16; };
        if (t.flags & LOW_BITS) {
            u32 bits[4];
            for (int k = 0; k < 4; ++k) bits[k] = __float_as_uint(w[k]);
            *reinterpret_cast<uint2*>(static_cast<u16*>(t.master) + i) = make_uint2(two(bits[0], bits[1]), two(bits[2], bits[3]));
        } else {
            store(static_cast<float*>(t.master ? t.master : t.weight) + i, w);
        }
        if (t.master)
            *reinterpret_cast<uint2*>(static_cast<u16*>(t.weight) + i) =
                make_uint2(two(nearest(w[0]), nearest(w[1])), two(nearest(w[2]), nearest(w[3])));
        store_states<STATES>(t, i, position, m, v);
    }
};

// Over a block's elements where all are kept, in groups of four, two of which are read before either is written.
template <int STATES, bool WRITE, class G, class Body>
DEVICE void over_chunk(const Target& t, i64 first, Body body) {
    const i64 length = t.mask.length, end = first + TILE < length ? first + TILE : length;
    const bool vector = aligned(t.weight) && aligned(t.master) && aligned(t.gradient) && (STATES < 1 || aligned(t.m)) &&
                        (STATES < 2 || aligned(t.v));
    const i64 before = t.flags & NARROW_STATES ? t.rounding.first : 0, stride = THREADS * 4;
    i64 i = first + threadIdx.x * 4;
    if (vector)
        for (; i + 4 <= end; i += 2 * stride) {
            Four<STATES, G> here, next;
            const bool both = i + stride + 4 <= end;
            here.read(t, i);
            if (both) next.read(t, i + stride);
            for (int k = 0; k < 4; ++k) body(here.w[k], here.g[k], here.m[k], here.v[k]);
            if (WRITE) here.write(t, i, before + i);
            if (!both) {
                i += stride;
                break;
            }
            for (int k = 0; k < 4; ++k) body(next.w[k], next.g[k], next.m[k], next.v[k]);
            if (WRITE) next.write(t, i + stride, before + i + stride);
        }
    // At most one ragged group per block in the vector case.
    for (; i < end; i += stride)
        for (i64 k = i; k < i + 4 && k < end; ++k) over_one<STATES, WRITE, G>(t, k, k, before + k, body);
}

// Over a block's kept elements. Weights are dense; the rest is dense too or, where flag 8 is set, compressed. Where flag 16 is set
// too, weights are as the rest, and no places are listed. Where flag 64 is set all of the target are some of the kept values, and the
// mask only says where they stand.
template <int STATES, bool WRITE, class G, class Body>
DEVICE void over_kept(const Target& t, const Kept& here, const u16* places, Body body) {
    for (u32 k = threadIdx.x; k < here.count; k += THREADS) {
        const i64 number = here.first + k;
        if ((t.flags & COMPRESSED_WEIGHT) && !(t.flags & KEPT_VALUES)) {
            over_one<STATES, WRITE, G>(t, number, number, number, body);
            continue;
        }
        const i64 place = t.mask.words ? here.origin + places[k] : t.mask.places[number];
        if (t.flags & KEPT_VALUES) {
            const i64 at = number - t.rounding.first;
            if (at >= 0 && at < t.rounding.count) over_one<STATES, WRITE, G>(t, at, at, place, body);
        } else {
            over_one<STATES, WRITE, G>(t, place, t.flags & COMPRESSED ? number : place, place, body);
        }
    }
}

template <int STATES, bool WRITE = true, class Body>
DEVICE void step(const Target& t, u32 chunk, Body body) {
    if (t.mask.words || t.mask.places) {
        __shared__ u16 places[TILE];
        const bool listed = !(t.flags & COMPRESSED_WEIGHT) || (t.flags & KEPT_VALUES);
        const Kept here = !t.mask.words ? count_kept(t.mask, chunk)
                          : listed      ? list_kept(t.mask, chunk, places)
                                        : span_kept(t.mask, chunk);
        if (t.flags & NARROW_GRADIENT)
            over_kept<STATES, WRITE, bf16>(t, here, places, body);
        else
            over_kept<STATES, WRITE, float>(t, here, places, body);
        return;
    }
    const i64 first = static_cast<i64>(chunk) * TILE;
    if (t.flags & NARROW_GRADIENT)
        over_chunk<STATES, WRITE, bf16>(t, first, body);
    else
        over_chunk<STATES, WRITE, float>(t, first, body);
}

// Adam's and LAMB's moments after a gradient g, and the direction they give.
DEVICE float direction(const Settings& s, float g, float& m, float& v) {
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    return m * s.unbias1 / (sqrtf(v) * s.unbias2 + s.eps);
}

KERNEL(256) update_sgd(const Target* targets, const Block* blocks, Settings s) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    step<0>(t, block.chunk, [&](float& w, float g, float&, float&) {
        w -= s.lr * (g * s.gradient_scale + t.decay * w);
    });
}

KERNEL(256) update_momentum(const Target* targets, const Block* blocks, Settings s) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    // Nesterov's step is lr (d + momentum v), the plain one lr (0 d + 1 v).
    const float now = s.nesterov ? 1.0f : 0.0f, ahead = s.nesterov ? s.momentum : 1.0f;
    step<1>(t, block.chunk, [&](float& w, float g, float& v, float&) {
        const float d = g * s.gradient_scale + t.decay * w;
        v = s.momentum * v + d;
        w -= s.lr * (now * d + ahead * v);
    });
}

KERNEL(256) update_adam(const Target* targets, const Block* blocks, Settings s) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    const float coupled = s.decoupled ? 0.0f : t.decay, keep = s.decoupled ? 1.0f - s.lr * t.decay : 1.0f;
    step<2>(t, block.chunk, [&](float& w, float g, float& m, float& v) {
        w = w * keep - s.lr * direction(s, g * s.gradient_scale + coupled * w, m, v);
    });
}

KERNEL(256) update_lars(const Target* targets, const Block* blocks, Settings s, const double2* norms) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    const double2 norm = norms[block.tensor];
    const double w_norm = sqrt(norm.x), g_norm = sqrt(norm.y) * fabs(static_cast<double>(s.gradient_scale));
    const bool adapt = (t.flags & ADAPT) && w_norm > 0.0 && g_norm > 0.0;
    const double ratio = adapt ? s.trust * w_norm / (g_norm + t.decay * w_norm + s.eps) : 1.0;
    const float inner = s.rate_outside ? 1.0f : s.lr, outer = s.rate_outside ? s.lr : 1.0f;
    const float rate = static_cast<float>(inner * ratio);
    step<1>(t, block.chunk, [&](float& w, float g, float& v, float&) {
        v = s.momentum * v + rate * (g * s.gradient_scale + t.decay * w);
        w -= outer * v;
    });
}

KERNEL(256) update_lamb(const Target* targets, const Block* blocks, Settings s, const double2* norms) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    const double2 norm = norms[block.tensor];
    const bool adapt = (t.flags & ADAPT) && norm.x > 0.0 && norm.y > 0.0;
    const double max_norm = s.max_norm;
    const double ratio = sqrt(norm.x) > max_norm ? max_norm / sqrt(norm.y) : sqrt(norm.x / norm.y);
    const float rate = static_cast<float>(s.lr * (adapt ? ratio : 1.0));
    step<2>(t, block.chunk, [&](float& w, float g, float& m, float& v) {
        w -= rate * (direction(s, g * s.gradient_scale, m, v) + t.decay * w);
    });
}

KERNEL(256) update_norms(const Target* targets, const Block* blocks, Settings s, int kind, double2* partial) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    double of_weight = 0.0, of_direction = 0.0;
    if (kind == 2)
        step<2, false>(t, block.chunk, [&](float w, float g, float m, float v) {
            const float u = direction(s, g * s.gradient_scale, m, v) + t.decay * w;
            of_weight += static_cast<double>(w) * w;
            of_direction += static_cast<double>(u) * u;
        });
    else if (kind == 1)
        step<0, false>(t, block.chunk, [&](float w, float g, float, float) {
            of_weight += static_cast<double>(w) * w;
            of_direction += static_cast<double>(g) * g;
        });
    else
        step<-1, false>(t, block.chunk, [&](float, float g, float, float) {
            of_direction += static_cast<double>(g) * g;
        });
    if (kind != 0) of_weight = block_sum(of_weight);
    of_direction = block_sum(of_direction);
    if (threadIdx.x == 0) partial[blockIdx.x] = make_double2(of_weight, of_direction);
}

KERNEL(1024) update_norms_total(const double2* partial, const u32* first, double2* norms) {
    double of_weight = 0.0, of_direction = 0.0;
    const u32 end = first[blockIdx.x + 1];
#pragma unroll 4
    for (u32 i = first[blockIdx.x] + threadIdx.x; i < end; i += blockDim.x)
        of_weight += partial[i].x, of_direction += partial[i].y;
    of_weight = block_sum(of_weight);
    of_direction = block_sum(of_direction);
    if (threadIdx.x == 0) norms[blockIdx.x] = make_double2(of_weight, of_direction);
}
