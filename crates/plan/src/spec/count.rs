//! Parameters, flops and activation bytes of a spec.
