//! The few functions of cuDNN's graph interface that convolutions take, and the numbers of its headers.
//!
//! Bound by hand: they are eleven, a result code that a later version invents stays a number, and a library that
//! lacks one is an error instead of a panic. Numbers are those of `cudnn_graph_v9.h`, which versions only add to.

use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

use crate::cuda::library;
use crate::error::{Error, Result};

/// A struct of functions, each with its name in the library and its type in the header.
macro_rules! functions {
    ($($field:ident: $name:literal as $type:ty,)*) => {
        /// cuDNN's functions; those that return an `i32` return 0 where all went well.
        #[derive(Debug)]
        pub(super) struct CudnnFunctions {
            $(pub $field: $type,)*
        }

        impl CudnnFunctions {
            fn find() -> Result<CudnnFunctions, String> {
                let library = library::cudnn()?;
                let find = |name: &CStr| {
                    let lacks = || format!("it lacks {}; install cuDNN 9", name.to_string_lossy());
                    library.function(name).ok_or_else(lacks)
                };
                Ok(CudnnFunctions {
                    // SAFETY: the header declares the function of this name with this type.
                    $($field: unsafe { std::mem::transmute::<*mut c_void, $type>(find($name)?) },)*
                })
            }
        }
    };
}

functions! {
    version: c"cudnnGetVersion" as unsafe extern "C" fn() -> usize,
    error_string: c"cudnnGetErrorString" as unsafe extern "C" fn(i32) -> *const c_char,
    create: c"cudnnCreate" as unsafe extern "C" fn(*mut CudnnHandle) -> i32,
    destroy: c"cudnnDestroy" as unsafe extern "C" fn(CudnnHandle) -> i32,
    set_stream: c"cudnnSetStream" as unsafe extern "C" fn(CudnnHandle, *mut c_void) -> i32,
    create_descriptor: c"cudnnBackendCreateDescriptor" as unsafe extern "C" fn(i32, *mut RawDescriptor) -> i32,
    destroy_descriptor: c"cudnnBackendDestroyDescriptor" as unsafe extern "C" fn(RawDescriptor) -> i32,
    finalize: c"cudnnBackendFinalize" as unsafe extern "C" fn(RawDescriptor) -> i32,
    set_attribute: c"cudnnBackendSetAttribute" as
        unsafe extern "C" fn(RawDescriptor, i32, i32, i64, *const c_void) -> i32,
    get_attribute: c"cudnnBackendGetAttribute" as
        unsafe extern "C" fn(RawDescriptor, i32, i32, i64, *mut i64, *mut c_void) -> i32,
    execute: c"cudnnBackendExecute" as unsafe extern "C" fn(CudnnHandle, RawDescriptor, RawDescriptor) -> i32,
}

#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct CudnnHandle(pub *mut c_void);

/// A descriptor of anything.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct RawDescriptor(pub *mut c_void);

impl CudnnFunctions {
    /// cuDNN's functions, or why they cannot be used.
    pub(super) fn load() -> Result<&'static CudnnFunctions, String> {
        static LOADED: OnceLock<Result<CudnnFunctions, String>> = OnceLock::new();
        LOADED.get_or_init(CudnnFunctions::find).as_ref().map_err(String::clone)
    }

    /// A result code as an error; `doing` names what was tried.
    pub(super) fn check(&self, code: i32, doing: &'static str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the library is loaded; it hands out a static string for any number.
        let text = unsafe { CStr::from_ptr((self.error_string)(code)) };
        Err(Error::Cuda { doing, why: format!("{} ({code})", text.to_string_lossy()) })
    }
}

/// What a descriptor describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum DescriptorKind {
    Convolution = 1,
    Engine = 2,
    EngineConfig = 3,
    Heuristics = 4,
    ConvPlan = 5,
    Forward = 10,
    BackwardFilter = 11,
    BackwardData = 12,
    ConvGraph = 15,
    Operands = 16,
    Tensor = 17,
}

/// The attributes of descriptors.
pub(super) mod attribute {
    pub(crate) const CONVOLUTION_COMPUTE: i32 = 100;
    pub(crate) const CONVOLUTION_MODE: i32 = 101;
    pub(crate) const CONVOLUTION_DILATIONS: i32 = 102;
    pub(crate) const CONVOLUTION_STRIDES: i32 = 103;
    pub(crate) const CONVOLUTION_PADDING_AFTER: i32 = 104;
    pub(crate) const CONVOLUTION_PADDING_BEFORE: i32 = 105;
    pub(crate) const CONVOLUTION_DIMENSIONS: i32 = 106;
    pub(crate) const HEURISTICS_MODE: i32 = 200;
    pub(crate) const HEURISTICS_GRAPH: i32 = 201;
    pub(crate) const HEURISTICS_RESULTS: i32 = 202;
    pub(crate) const CONFIG_ENGINE: i32 = 300;
    pub(crate) const PLAN_HANDLE: i32 = 400;
    pub(crate) const PLAN_CONFIG: i32 = 401;
    pub(crate) const PLAN_WORKSPACE: i32 = 402;
    /// Of a forward pass, then of the two backward ones: alpha, beta, the convolution, and three tensors.
    pub(crate) const FORWARD: PassAttributes =
        PassAttributes { alpha: 700, beta: 701, convolution: 702, w: 703, x: 704, y: 705 };
    pub(crate) const BACKWARD_DATA: PassAttributes =
        PassAttributes { alpha: 706, beta: 707, convolution: 708, w: 709, x: 710, y: 711 };
    pub(crate) const BACKWARD_FILTER: PassAttributes =
        PassAttributes { alpha: 712, beta: 713, convolution: 714, w: 715, x: 716, y: 717 };
    pub(crate) const GRAPH_HANDLE: i32 = 800;
    pub(crate) const GRAPH_OPERATIONS: i32 = 801;
    pub(crate) const TENSOR_ALIGNMENT: i32 = 900;
    pub(crate) const TENSOR_TYPE: i32 = 901;
    pub(crate) const TENSOR_DIMENSIONS: i32 = 902;
    pub(crate) const TENSOR_STRIDES: i32 = 903;
    pub(crate) const TENSOR_ID: i32 = 906;
    pub(crate) const OPERANDS_IDS: i32 = 1000;
    pub(crate) const OPERANDS_POINTERS: i32 = 1001;
    pub(crate) const OPERANDS_WORKSPACE: i32 = 1003;
    pub(crate) const ENGINE_INDEX: i32 = 1301;
    pub(crate) const ENGINE_NUMERICAL_NOTE: i32 = 1303;
    pub(crate) const ENGINE_BEHAVIOUR_NOTE: i32 = 1305;

    /// The attributes of one of the three operations.
    pub struct PassAttributes {
        pub alpha: i32,
        pub beta: i32,
        pub convolution: i32,
        pub w: i32,
        pub x: i32,
        pub y: i32,
    }
}

/// What an attribute can hold, with the number by which cuDNN tells it from others.
pub(super) trait AttributeValue: Copy {
    const TYPE: i32;
}

macro_rules! values {
    ($($(#[$doc:meta])* $name:ident($inner:ty) = $number:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(pub $inner);
        impl AttributeValue for $name {
            const TYPE: i32 = $number;
        }
    )*};
}

values! {
    ElementType(i32) = 1;
    /// An address on the GPU.
    Address(u64) = 6;
    /// Whether the window is turned over.
    ConvolutionMode(i32) = 7;
    /// How algorithms are ranked.
    HeuristicsMode(i32) = 8;
    /// What an engine does to numbers.
    NumericalNote(i32) = 11;
    /// What an engine needs.
    BehaviourNote(i32) = 19;
}

impl AttributeValue for CudnnHandle {
    const TYPE: i32 = 0;
}
impl AttributeValue for i64 {
    const TYPE: i32 = 3;
}
impl AttributeValue for f32 {
    const TYPE: i32 = 4;
}
impl AttributeValue for RawDescriptor {
    const TYPE: i32 = 15;
}

impl ElementType {
    pub(super) const F32: ElementType = ElementType(0);
    pub(super) const BF16: ElementType = ElementType(9);
}

impl ConvolutionMode {
    /// The window as it is, which mathematics calls a correlation.
    pub(super) const CORRELATION: ConvolutionMode = ConvolutionMode(1);
}

impl HeuristicsMode {
    /// What serves almost everything, unranked.
    pub(super) const FALLBACK: HeuristicsMode = HeuristicsMode(2);
    /// The library's ranking.
    pub(super) const RANKED: HeuristicsMode = HeuristicsMode(3);
}

impl NumericalNote {
    pub(super) const TENSOR_CORE: NumericalNote = NumericalNote(0);
    pub(super) const DOWN_CONVERTED_INPUTS: NumericalNote = NumericalNote(1);
    pub(super) const REDUCED_PRECISION_SUMS: NumericalNote = NumericalNote(2);
    pub(super) const FOURIER: NumericalNote = NumericalNote(3);
    pub(super) const NOT_REPEATABLE: NumericalNote = NumericalNote(4);
    pub(super) const WINOGRAD: NumericalNote = NumericalNote(5);
    pub(super) const WINOGRAD_4X4: NumericalNote = NumericalNote(6);
    pub(super) const WINOGRAD_6X6: NumericalNote = NumericalNote(7);
    pub(super) const WINOGRAD_13X13: NumericalNote = NumericalNote(8);
    /// How many there are, and so the most that an engine has.
    pub(super) const COUNT: usize = 10;
}

impl BehaviourNote {
    pub(super) const RUNTIME_COMPILATION: BehaviourNote = BehaviourNote(0);
    /// How many there are, and so the most that an engine has.
    pub(super) const COUNT: usize = 5;
}
