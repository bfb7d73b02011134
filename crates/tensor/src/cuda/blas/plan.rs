//! How one product is done: cuBLASLt's descriptions of it and the algorithms it offers.

use std::ffi::c_void;
use std::fmt;

use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtEpilogue_t as LtEpilogue, cublasLtHandle_t,
    cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasLtReductionScheme_t as Reduction, cublasStatus_t, cudaDataType_t,
};

use super::{CheckStatus, destroyed_by};
use crate::dtype::DType;
use crate::error::Result;

/// How many algorithms are asked for.
const OFFERS: usize = 8;

/// What tells one product from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MatmulKey {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub ta: bool,
    pub tb: bool,
    /// Elements between two rows of each matrix as it is stored, where not all lie without gaps.
    pub strides: Option<[usize; 3]>,
    pub input: DType,
    pub output: DType,
    pub accumulate: bool,
    pub kind: EpilogueKind,
}

/// What happens to a finished sum on its way out, as `ops::matmul::cuda::MatmulEpilogue` describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum EpilogueKind {
    Plain,
    Bias,
    Gelu,
    GeluBias,
}

impl EpilogueKind {
    /// Whether it reads a bias.
    fn has_vector(self) -> bool {
        matches!(self, EpilogueKind::Bias | EpilogueKind::GeluBias)
    }

    /// Whether it keeps what stands before the activation.
    fn has_matrix(self) -> bool {
        matches!(self, EpilogueKind::Gelu | EpilogueKind::GeluBias)
    }
}

impl MatmulKey {
    /// Whether it is worth asking. Rows of what an epilogue keeps must be a multiple of 8 elements; and its GELU
    /// takes the hardware's tanh, which errs by 5e-4: enough for bf16, not for f32.
    pub(super) fn possible(&self) -> bool {
        !self.kind.has_matrix() || (self.n.is_multiple_of(8) && self.output == DType::Bf16)
    }
}

impl fmt::Display for MatmulKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let t = |transposed| if transposed { "T" } else { "N" };
        write!(f, "{} x {} x {} {}{} ", self.m, self.n, self.k, t(self.ta), t(self.tb))?;
        write!(f, "{:?} to {:?} {:?}", self.input, self.output, self.kind)
    }
}

/// A product's descriptions and algorithms, best first.
#[derive(Debug)]
pub(super) struct MatmulPlan {
    pub operation: MatmulDescription,
    pub first: MatrixLayout,
    pub second: MatrixLayout,
    pub result: MatrixLayout,
    pub algorithms: Vec<cublasLtMatmulAlgo_t>,
}

// SAFETY: descriptions are plain memory of the library's, used by one thread at a time.
unsafe impl Send for MatmulPlan {}

impl MatmulPlan {
    /// `None` where cuBLASLt has no algorithm for the product.
    pub(super) fn new(
        handle: cublasLtHandle_t,
        key: &MatmulKey,
        tf32: bool,
        workspace: usize,
    ) -> Result<Option<MatmulPlan>> {
        let operation = MatmulDescription::new(if tf32 {
            Compute::CUBLAS_COMPUTE_32F_FAST_TF32
        } else {
            Compute::CUBLAS_COMPUTE_32F
        })?;
        // CUBLAS_OP_N and CUBLAS_OP_T.
        let transposed = |t: bool| i32::from(t);
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transposed(key.tb))?;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transposed(key.ta))?;
        let epilogue = match key.kind {
            EpilogueKind::Plain => LtEpilogue::CUBLASLT_EPILOGUE_DEFAULT,
            EpilogueKind::Bias => LtEpilogue::CUBLASLT_EPILOGUE_BIAS,
            EpilogueKind::Gelu => LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX,
            EpilogueKind::GeluBias => LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        };
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        if key.kind.has_vector() {
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type(key.output))?;
        }
        if key.kind.has_matrix() {
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n as i64)?;
        }
        // What lies as [rows, width] by rows lies as [width, rows] by columns.
        let stored = |rows: usize, width: usize, t: bool| if t { (rows, width) } else { (width, rows) };
        let (b_rows, b_cols) = stored(key.k, key.n, key.tb);
        let (a_rows, a_cols) = stored(key.m, key.k, key.ta);
        let [of_a, of_b, of_c] = key.strides.unwrap_or([a_rows, b_rows, key.n]);
        let mut plan = MatmulPlan {
            operation,
            // Our `b` is its first operand, `A`.
            first: MatrixLayout::new(key.input, [b_rows, b_cols], of_b)?,
            second: MatrixLayout::new(key.input, [a_rows, a_cols], of_a)?,
            result: MatrixLayout::new(key.output, [key.n, key.m], of_c)?,
            algorithms: Vec::new(),
        };
        // The ranking of an epilogue's algorithms looks at its pointers' alignment, so they need a value.
        let aligned = |used: bool| used.then_some(256);
        plan.point(aligned(key.kind.has_vector()), aligned(key.kind.has_matrix()))?;
        plan.algorithms = plan.offers(handle, workspace, key.strides.is_some())?;
        Ok(if plan.algorithms.is_empty() { None } else { Some(plan) })
    }

    /// `inside`: whether matrices may begin inside larger ones, at any 16 bytes.
    fn offers(
        &self,
        handle: cublasLtHandle_t,
        workspace: usize,
        inside: bool,
    ) -> Result<Vec<cublasLtMatmulAlgo_t>> {
        let preference = MatmulPreference::new()?;
        if inside {
            for matrix in [
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
            ] {
                preference.set(matrix, 16u32)?;
            }
        }
        preference.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace)?;
        // Parts of a sum over k may be joined only from the scratch space, in f32 and in a fixed order.
        let reduction = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction)?;
        let empty = cublasLtMatmulHeuristicResult_t {
            algo: cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let mut offers = [empty; OFFERS];
        let mut count = 0;
        // SAFETY: all descriptions live; the library writes at most OFFERS results and their number.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation.0,
                self.first.0,
                self.second.0,
                self.result.0,
                self.result.0,
                preference.0,
                OFFERS as i32,
                offers.as_mut_ptr(),
                &mut count,
            )
        };
        if matches!(
            status,
            cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED | cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
        ) {
            return Ok(Vec::new());
        }
        status.check("asking for a matrix product's algorithms")?;
        let offers = &offers[..count as usize];
        let good = offers.iter().filter(|o| o.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(good.map(|offer| offer.algo).collect())
    }

    /// Sets the addresses of a call: of the bias, and of what stands before the activation.
    pub(super) fn point(&self, bias: Option<u64>, aux: Option<u64>) -> Result<()> {
        if let Some(bias) = bias {
            self.operation.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)?;
        }
        if let Some(aux) = aux {
            self.operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux)?;
        }
        Ok(())
    }

    /// Forgets the best algorithm; whether another is left.
    pub(super) fn drop_best(&mut self) -> bool {
        self.algorithms.remove(0);
        !self.algorithms.is_empty()
    }
}

fn data_type(dtype: DType) -> cudaDataType_t {
    dtype.by_float(cudaDataType_t::CUDA_R_32F, cudaDataType_t::CUDA_R_16BF)
}

fn bytes<T>(value: &T) -> (*const c_void, usize) {
    ((value as *const T).cast(), size_of::<T>())
}

#[derive(Debug)]
pub(super) struct MatmulDescription(pub cublasLtMatmulDesc_t);

impl MatmulDescription {
    fn new(compute: Compute) -> Result<MatmulDescription> {
        let mut description = std::ptr::null_mut();
        // SAFETY: the library is loaded; it writes the handle.
        unsafe { sys::cublasLtMatmulDescCreate(&mut description, compute, cudaDataType_t::CUDA_R_32F) }
            .check("describing a matrix product")?;
        Ok(MatmulDescription(description))
    }

    fn set<T>(&self, attribute: Attribute, value: T) -> Result<()> {
        let (value, size) = bytes(&value);
        // SAFETY: the description lives; the library reads `size` bytes and refuses a wrong number.
        unsafe { sys::cublasLtMatmulDescSetAttribute(self.0, attribute, value, size) }
            .check("describing a matrix product")
    }
}

destroyed_by!(MatmulDescription, sys::cublasLtMatmulDescDestroy);

/// A matrix by columns, `stride` elements from one to the next.
#[derive(Debug)]
pub(super) struct MatrixLayout(pub cublasLtMatrixLayout_t);

impl MatrixLayout {
    fn new(dtype: DType, [rows, cols]: [usize; 2], stride: usize) -> Result<MatrixLayout> {
        let mut layout = std::ptr::null_mut();
        let (dtype, rows, cols, stride) = (data_type(dtype), rows as u64, cols as u64, stride as i64);
        // SAFETY: the library is loaded; it writes the handle.
        unsafe { sys::cublasLtMatrixLayoutCreate(&mut layout, dtype, rows, cols, stride) }
            .check("describing a matrix")?;
        Ok(MatrixLayout(layout))
    }
}

destroyed_by!(MatrixLayout, sys::cublasLtMatrixLayoutDestroy);

/// What algorithms should keep to.
struct MatmulPreference(cublasLtMatmulPreference_t);

impl MatmulPreference {
    fn new() -> Result<MatmulPreference> {
        let mut preference = std::ptr::null_mut();
        // SAFETY: the library is loaded; it writes the handle.
        unsafe { sys::cublasLtMatmulPreferenceCreate(&mut preference) }.check("stating a preference")?;
        Ok(MatmulPreference(preference))
    }

    fn set<T>(&self, attribute: Preference, value: T) -> Result<()> {
        let (value, size) = bytes(&value);
        // SAFETY: the preference lives; the library reads `size` bytes and refuses a wrong number.
        unsafe { sys::cublasLtMatmulPreferenceSetAttribute(self.0, attribute, value, size) }
            .check("stating a preference")
    }
}

destroyed_by!(MatmulPreference, sys::cublasLtMatmulPreferenceDestroy);
