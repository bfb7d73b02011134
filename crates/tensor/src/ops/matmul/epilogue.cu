// What follows a matrix product where cuBLASLt cannot do it on the way out: odd widths, or a type for which it
// has no such kernel. c: [rows, width], row after row.

// GPT-2's GELU, x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3).
constexpr float ROOT = 0.7978845608028654f;
constexpr float CUBIC = 0.044715f;

DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(ROOT * (x + CUBIC * x * x * x))); }

// c += bias, on every row.
KERNEL(256) add_bias(T* c, const T* bias, u64 elements, u64 width) {
    for (u64 i = thread_in_grid(); i < elements; i += threads_in_grid()) {
        c[i] = from_f32<T>(to_f32(c[i]) + to_f32(bias[i % width]));
    }
}

// pre = c + bias, c = gelu(pre); bias may be null.
KERNEL(256) bias_gelu(T* c, const T* bias, T* pre, u64 elements, u64 width) {
    for (u64 i = thread_in_grid(); i < elements; i += threads_in_grid()) {
        const float x = to_f32(c[i]) + (bias ? to_f32(bias[i % width]) : 0.0f);
        pre[i] = from_f32<T>(x);
        c[i] = from_f32<T>(gelu(x));
    }
}
