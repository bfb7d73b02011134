// What stands before and behind the product of a row and a matrix: a part of its kernels.

// A norm of x: of both moments, or of the second alone. Scale: T [k], or null for no norm; shift: T [k] or null.
struct Before {
    const T* scale;
    const T* shift;
    float eps;
    int centred;
};

// What becomes of a sum: y = f(sum + bias) + plus. Both of T [n] or null; f by its number in activation/formulas.cuh.
struct After {
    const T* bias;
    const T* plus;
    i64 kind;

    DEVICE void put(T* y, i64 at, float sum) const {
        if (bias) sum += to_f32(bias[at]);
        sum = activated(sum, static_cast<int>(kind));
        if (plus) sum += to_f32(plus[at]);
        y[at] = from_f32<T>(sum);
    }
};
