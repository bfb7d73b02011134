// Optimizer steps over a whole model in one launch; the formulas are those of update.rs.
//
// The model is an array of Targets, and a list of blocks: block i works on elements chunk 4096 .. of tensor
// blocks[i].tensor, a tensor's blocks standing together and in order. Both arrays are made once, in device memory.
// Everything here is independent of T: a weight is f32 without a master copy, bf16 with one; a gradient is f32
// or, where flag 1 is set, bf16. All kernels but the last: grid = the number of blocks, block 256.
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

struct Target {
    void* weight;
    float* master;
    const void* gradient;
    float* m;
    float* v;
    i64 length;
    float decay;
    u32 flags;  // 1: the gradient is bf16, 2: a trust ratio applies
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
    u32 nesterov;
    u32 decoupled;
};

enum : u32 { NARROW_GRADIENT = 1, ADAPT = 2 };

// Runs body(w, g, m, v) over the block's elements, in groups. STATES: -1 reads the gradient alone, 0 the weight
// too, 1 also m, 2 also v; where WRITE, all of these but the gradient are written back.
template <int STATES, bool WRITE, class G, class Body>
DEVICE void over_chunk(const Target& t, i64 first, Body body) {
    const i64 end = first + TILE < t.length ? first + TILE : t.length;
    float* const w = t.master ? t.master : static_cast<float*>(t.weight);
    bf16* const rounded = t.master ? static_cast<bf16*>(t.weight) : nullptr;
    const G* const gradient = static_cast<const G*>(t.gradient);
    const auto group = [&](i64 i, auto width) {
        constexpr int N = width.value;
        float ws[N], gs[N], ms[N], vs[N];
        if (STATES >= 0) load(w + i, ws);
        load(gradient + i, gs);
        if (STATES > 0) load(t.m + i, ms);
        if (STATES > 1) load(t.v + i, vs);
        for (int k = 0; k < N; ++k) body(ws[k], gs[k], ms[k], vs[k]);
        if (!WRITE) return;
        store(w + i, ws);
        if (rounded) store(rounded + i, ws);
        if (STATES > 0) store(t.m + i, ms);
        if (STATES > 1) store(t.v + i, vs);
    };
    const bool vector = aligned(w) && aligned(rounded) && aligned(gradient) && (STATES < 1 || aligned(t.m)) &&
                        (STATES < 2 || aligned(t.v));
    i64 i = first + threadIdx.x * 4;
    if (vector)
        for (; i + 4 <= end; i += THREADS * 4) group(i, Width<4>());
    // At most one ragged group per block in the vector case.
    for (; i < end; i += THREADS * 4)
        for (i64 k = i; k < i + 4 && k < end; ++k) group(k, Width<1>());
}

template <int STATES, bool WRITE = true, class Body>
DEVICE void step(const Target& t, u32 chunk, Body body) {
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
    const float rate = static_cast<float>(s.lr * ratio);
    step<1>(t, block.chunk, [&](float& w, float g, float& v, float&) {
        v = s.momentum * v + rate * (g * s.gradient_scale + t.decay * w);
        w -= v;
    });
}

KERNEL(256) update_lamb(const Target* targets, const Block* blocks, Settings s, const double2* norms) {
    const Block block = blocks[blockIdx.x];
    const Target t = targets[block.tensor];
    const double2 norm = norms[block.tensor];
    const bool adapt = (t.flags & ADAPT) && norm.x > 0.0 && norm.y > 0.0;
    const float rate = static_cast<float>(s.lr * (adapt ? sqrt(norm.x / norm.y) : 1.0));
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
