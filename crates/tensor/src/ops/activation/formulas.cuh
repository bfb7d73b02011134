// Activations of one number and their slopes; the formulas and what is saved are those of activation.rs.

constexpr float GELU_SCALE = 0.7978846f;
constexpr float GELU_CUBE = 0.044715f;

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
DEVICE float gelu_gate(float x) { return sigmoid(2.0f * GELU_SCALE * x * (1.0f + GELU_CUBE * x * x)); }

struct Relu {
    // This way round, a NaN passes.
    DEVICE static float apply(float x) { return x < 0.0f ? 0.0f : x; }
    DEVICE static float slope(float y) { return y > 0.0f ? 1.0f : 0.0f; }
};

struct Gelu {
    DEVICE static float apply(float x) { return x * gelu_gate(x); }
    DEVICE static float slope(float x) {
        const float gate = gelu_gate(x);
        const float inner = 2.0f * GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
        return gate + x * gate * (1.0f - gate) * inner;
    }
};

struct Silu {
    DEVICE static float apply(float x) { return x * sigmoid(x); }
    DEVICE static float slope(float x) {
        const float gate = sigmoid(x);
        return gate + x * gate * (1.0f - gate);
    }
};

struct GeluErf {
    DEVICE static float below(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }
    DEVICE static float apply(float x) { return x * below(x); }
    DEVICE static float slope(float x) {
        return below(x) + (fabsf(x) > 20.0f ? 0.0f : x * expf(-0.5f * x * x) * 0.3989423f);
    }
};

struct Tanh {
    DEVICE static float apply(float x) { return tanhf(x); }
    DEVICE static float slope(float x) {
        const float y = tanhf(x);
        return 1.0f - y * y;
    }
};

// By number, as activation/cuda.rs has them: 0 ReLU, 1 GELU (tanh), 2 SiLU, 3 GELU (erf), 4 tanh; otherwise x itself.
DEVICE float activated(float x, int kind) {
    if (kind == 0) return Relu::apply(x);
    if (kind == 1) return Gelu::apply(x);
    if (kind == 2) return Silu::apply(x);
    if (kind == 3) return GeluErf::apply(x);
    if (kind == 4) return Tanh::apply(x);
    return x;
}
