//! Which instructions this processor has, found at run time, and a macro that compiles a loop for each of them.

/// An instruction set, from the plainest to the richest; each includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the compiler's base target has.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AVX-512 and the AMX tile unit with bf16 products.
    Amx,
}

impl Isa {
    /// The richest set that the processor and the operating system give us.
    pub fn best() -> Isa {
        static BEST: std::sync::OnceLock<Isa> = std::sync::OnceLock::new();
        *BEST.get_or_init(detect)
    }

    /// All sets this machine has, plainest first.
    pub fn available() -> impl Iterator<Item = Isa> {
        [Isa::Portable, Isa::Avx2, Isa::Avx512, Isa::Amx].into_iter().filter(|&isa| isa <= Isa::best())
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (false, _) => Isa::Portable,
        (true, false) => Isa::Avx2,
        (true, true) if amx_granted() => Isa::Amx,
        (true, true) => Isa::Avx512,
    }
}

/// Whether the processor has AMX with bf16 (CPUID leaf 7, EDX bits 22 and 24) and Linux lets this process use
/// its tile registers, which it must be asked for once (`arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`).
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx_granted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    let edx = std::arch::x86_64::__cpuid_count(7, 0).edx;
    let has = edx & (1 << 22) != 0 && edx & (1 << 24) != 0;
    // SAFETY: the call reads no memory of ours; on an older kernel it returns an error.
    has && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn amx_granted() -> bool {
    false
}

/// Compiles a function once for each [`Isa`] and picks one at run time by its first argument.
///
/// The body is plain Rust; the compiler vectorises it for each target. Helpers that it calls must be
/// `#[inline(always)]`, or they would be compiled for the base target. Type parameters stand in brackets, and a constant
/// behind them: `[T: Float; const N]`.
///
/// ```
/// espalier_tensor::simd! {
///     /// Adds `x` to `y`.
///     pub fn add[T: espalier_tensor::Float](x: &[T], y: &mut [T]) {
///         for (y, x) in y.iter_mut().zip(x) {
///             *y = T::from_f32(y.to_f32() + x.to_f32());
///         }
///     }
/// }
/// let mut y = [1.0f32; 4];
/// add(espalier_tensor::cpu::Isa::best(), &[2.0; 4], &mut y);
/// assert_eq!(y, [3.0; 4]);
/// ```
#[macro_export]
macro_rules! simd {
    ($($(#[$meta:meta])* $vis:vis fn $name:ident $([$($g:ident: $bound:path),* $(; const $n:ident)?])?
       ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name$(<$($g: $bound),* $(, const $n: usize)?>)?(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn plain$(<$($g: $bound),* $(, const $n: usize)?>)?($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2$(<$($g: $bound),* $(, const $n: usize)?>)?($($arg: $ty),*) $(-> $ret)? {
                    plain$(::<$($g),* $(, $n)?>)?($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512$(<$($g: $bound),* $(, const $n: usize)?>)?($($arg: $ty),*) $(-> $ret)? {
                    plain$(::<$($g),* $(, $n)?>)?($($arg),*)
                }
                // SAFETY: an `Isa` above `Portable` is only ever handed out where the processor has it.
                unsafe {
                    match isa {
                        $crate::cpu::Isa::Portable => plain$(::<$($g),* $(, $n)?>)?($($arg),*),
                        $crate::cpu::Isa::Avx2 => avx2$(::<$($g),* $(, $n)?>)?($($arg),*),
                        $crate::cpu::Isa::Avx512 | $crate::cpu::Isa::Amx => avx512$(::<$($g),* $(, $n)?>)?($($arg),*),
                    }
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            {
                let _ = isa;
                plain$(::<$($g),* $(, $n)?>)?($($arg),*)
            }
        }
    )*};
}
