//! Which instructions this processor has, found at run time, and a macro that compiles a loop for each of them.

use std::fmt;

/// Proof that the processor has AVX2 with FMA. Only detection makes one, so holding it is what a call of such
/// code rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

/// Proof that the processor has AVX-512 F, BW, DQ and VL, and AVX2 with FMA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512(());

/// Proof that the processor has AVX-512 and AMX tiles with bf16 products, and that the system has granted the
/// tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amx(());

/// An instruction set, from the plainest to the richest; each includes the ones before it.
///
/// It carries the proof that the processor has it, which takes no memory. The portable one is always to be
/// had; another comes from [`Isa::best`] or [`Isa::available`] and from nowhere else:
///
/// ```compile_fail,E0423
/// let made_up = espalier_tensor::cpu::Isa::Amx(espalier_tensor::cpu::isa::Amx(()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Whatever the compiler's base target has.
    Portable,
    /// AVX2 with FMA.
    Avx2(Avx2),
    /// AVX-512 F, BW, DQ, VL.
    Avx512(Avx512),
    /// AVX-512 and the AMX tile unit with bf16 products.
    Amx(Amx),
}

impl Isa {
    /// The richest set that the processor and the operating system give us.
    pub fn best() -> Isa {
        Isa::available().last().expect("the portable one is always there")
    }

    /// All sets this machine has, plainest first: how a device is restricted to a lower one.
    pub fn available() -> impl Iterator<Item = Isa> {
        static FOUND: std::sync::OnceLock<[Option<Isa>; 4]> = std::sync::OnceLock::new();
        FOUND.get_or_init(detect).iter().copied().flatten()
    }

    /// The proof of AVX-512, where this set includes it.
    pub fn avx512(self) -> Option<Avx512> {
        match self {
            Isa::Portable | Isa::Avx2(_) => None,
            Isa::Avx512(proof) => Some(proof),
            Isa::Amx(Amx(())) => Some(Avx512(())),
        }
    }

    /// The proof of AMX, where this is that set.
    pub fn amx(self) -> Option<Amx> {
        match self {
            Isa::Amx(proof) => Some(proof),
            _ => None,
        }
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "Portable",
            Isa::Avx2(_) => "Avx2",
            Isa::Avx512(_) => "Avx512",
            Isa::Amx(_) => "Amx",
        })
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> [Option<Isa>; 4] {
    [Some(Isa::Portable), None, None, None]
}

/// The one place where proofs are made.
#[cfg(target_arch = "x86_64")]
fn detect() -> [Option<Isa>; 4] {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let amx = avx512 && amx_granted();
    [
        Some(Isa::Portable),
        avx2.then_some(Isa::Avx2(Avx2(()))),
        avx512.then_some(Isa::Avx512(Avx512(()))),
        amx.then_some(Isa::Amx(Amx(()))),
    ]
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

/// Calls whichever of three functions is compiled for the richest set that `$isa` includes.
macro_rules! by_isa {
    ($isa:expr, [$portable:ident, $avx2:ident, $avx512:ident], $($arg:expr),*) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::Isa::Avx512(_) | $crate::cpu::Isa::Amx(_) => $avx512($($arg),*),
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::Isa::Avx2(_) => $avx2($($arg),*),
            _ => $portable($($arg),*),
        }
    };
}
pub(crate) use by_isa;

/// Compiles a function once for each [`Isa`] and picks one at run time by its first argument.
///
/// The body is plain Rust; the compiler vectorises it for each target. Helpers that it calls must be
/// `#[inline(always)]`, or they would be compiled for the base target. Type parameters stand in brackets, and
/// a constant behind them: `[T: Float; const N]`.
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
                // SAFETY: an `Isa` above `Portable` carries the proof that the processor has it.
                unsafe {
                    match isa {
                        $crate::cpu::Isa::Portable => plain$(::<$($g),* $(, $n)?>)?($($arg),*),
                        $crate::cpu::Isa::Avx2(_) => avx2$(::<$($g),* $(, $n)?>)?($($arg),*),
                        $crate::cpu::Isa::Avx512(_) | $crate::cpu::Isa::Amx(_) => avx512$(::<$($g),* $(, $n)?>)?($($arg),*),
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
