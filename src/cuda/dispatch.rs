//! THE table: which compiled kernel runs a head_dim on a device.
//!
//! [`forward`], [`backward`] and the public `is_supported` ask the same rows, so nothing is admitted that
//! could not be launched.

use std::ffi::OsString;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute as Attribute;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Result, bail};

use super::ffi::{self, BwdParams, FwdParams, Kernel};
use crate::params::AttnParams;

/// Element types of the kernels.
pub(crate) const DTYPES: [DType; 2] = [DType::F16, DType::BF16];

/// Rows are read 16 bytes at a time.
pub(crate) const HEAD_DIM_MULTIPLE: usize = 8;

/// What the kernels need to know of a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gpu {
    pub(crate) compute_capability: (i32, i32),
    pub(super) multiprocessors: usize,
    /// Shared memory that a block can be given, in KiB.
    pub(super) shared_kib: usize,
    pub(super) sm90: Sm90,
}

/// Where kernels for compute capability 9.0 alone run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Sm90 {
    Nowhere,
    WhereFaster,
    WhereverTheyCan,
}

impl Gpu {
    pub(crate) fn of(device: &CudaDevice) -> Result<Self> {
        let stream = device.cuda_stream();
        let context: &CudaContext = stream.context();
        let attribute = |attribute| context.attribute(attribute).w();
        let shared_bytes =
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let compute_capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        Ok(Self {
            compute_capability,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?
                as usize,
            shared_kib: shared_limit(variable("CANDLE_FLASH_GQA_SHARED_KIB"))?
                .min(shared_bytes as usize >> 10),
            sm90: match sm90(variable("CANDLE_FLASH_GQA_KERNELS"))? {
                sm90 if compute_capability == (9, 0) => sm90,
                _ => Sm90::Nowhere,
            },
        })
    }
}

/// `CANDLE_FLASH_GQA_SHARED_KIB` makes a GPU look like one with less shared memory, to test the kernels of
/// such a one.
fn shared_limit(variable: Option<OsString>) -> Result<usize> {
    let Some(limit) = variable else {
        return Ok(usize::MAX);
    };
    match limit.to_str().and_then(|limit| limit.parse().ok()) {
        Some(limit) => Ok(limit),
        None => bail!("CANDLE_FLASH_GQA_SHARED_KIB must be a number of KiB, got {limit:?}"),
    }
}

/// `CANDLE_FLASH_GQA_KERNELS=sm80` leaves out the kernels for Hopper alone, to test and to time the others there; `=sm90`
/// has them run also where those are faster.
fn sm90(variable: Option<OsString>) -> Result<Sm90> {
    match variable {
        None => Ok(Sm90::WhereFaster),
        Some(kernels) if kernels == "sm80" => Ok(Sm90::Nowhere),
        Some(kernels) if kernels == "sm90" => Ok(Sm90::WhereverTheyCan),
        Some(kernels) => {
            bail!("CANDLE_FLASH_GQA_KERNELS must be sm80, sm90 or not set, got {kernels:?}")
        }
    }
}

/// A variable of the environment that is not empty.
fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// Which problems a kernel takes, by what is done to their scores.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Modes {
    /// Only those that scale by a positive factor: no softcap, no alibi.
    Plain,
    Any,
}

/// One row of the table.
struct Row<Params: 'static> {
    name: &'static str,
    head_dim: usize,
    shared_kib: usize,
    /// For compute capability 9.0 alone.
    sm90: bool,
    modes: Modes,
    kernel: &'static Kernel<Params>,
}

/// A kernel that was chosen.
#[derive(Debug)]
pub(super) struct Chosen<Params: 'static> {
    pub(super) name: &'static str,
    /// The kernel's own: that of the problem is at most this.
    pub(super) head_dim: usize,
    /// It is for compute capability 9.0: its copy engine reads the inputs, and its blocks can take pieces of work by
    /// a counter.
    pub(super) sm90: bool,
    pub(super) kernel: &'static Kernel<Params>,
}

/// A function that lists the rows of one pass.
macro_rules! rows {
    ($function:ident, $params:ty; $($file:literal, $symbol:ident, $head_dim:literal, $shared_kib:literal, $modes:ident;)*) => {
        fn $function() -> impl Iterator<Item = Row<$params>> {
            [$(Row {
                name: stringify!($symbol),
                head_dim: $head_dim,
                shared_kib: $shared_kib,
                sm90: $file.starts_with("sm90/"),
                modes: Modes::$modes,
                // SAFETY: a constant of the linked library, never written, of the type that ffi.rs states.
                kernel: unsafe { &ffi::$symbol },
            }),*].into_iter()
        }
    };
}
macro_rules! forward_rows {
    ($($rows:tt)*) => { rows! { forward_rows, FwdParams; $($rows)* } };
}
macro_rules! backward_rows {
    ($($rows:tt)*) => { rows! { backward_rows, BwdParams; $($rows)* } };
}
instances!(forward_rows, backward_rows);

/// The first row that runs there: rows are in order of head_dim, the best of each first.
fn choose<Params>(
    mut rows: impl Iterator<Item = Row<Params>>,
    gpu: &Gpu,
    head_dim: usize,
    plain: bool,
) -> Option<Chosen<Params>> {
    if gpu.compute_capability < (8, 0)
        || head_dim == 0
        || !head_dim.is_multiple_of(HEAD_DIM_MULTIPLE)
    {
        return None;
    }
    let row = rows.find(|row| {
        head_dim <= row.head_dim
            && row.shared_kib <= gpu.shared_kib
            && (plain || row.modes == Modes::Any)
            && (!row.sm90 || gpu.sm90 != Sm90::Nowhere)
    })?;
    Some(Chosen {
        name: row.name,
        head_dim: row.head_dim,
        sm90: row.sm90,
        kernel: row.kernel,
    })
}

/// The largest head_dim that has kernels.
pub(crate) fn max_head_dim() -> usize {
    forward_rows().map(|row| row.head_dim).max().unwrap_or(0)
}

/// Whether both passes have a kernel.
pub(crate) fn is_supported(gpu: &Gpu, dtype: DType, head_dim: usize) -> bool {
    DTYPES.contains(&dtype)
        && choose(forward_rows(), gpu, head_dim, false).is_some()
        && choose(backward_rows(), gpu, head_dim, false).is_some()
}

/// The kernel for a problem that [`is_supported`] admits.
pub(super) fn forward(gpu: &Gpu, params: &AttnParams) -> Option<Chosen<FwdParams>> {
    let rows = forward_rows().filter(|row| {
        !row.sm90 || gpu.sm90 != Sm90::WhereFaster || !is_small(params, row.head_dim)
    });
    choose(rows, gpu, params.head_dim, is_plain(params))
}

/// Whether there is too little to do for Hopper's forward of `head_dim` columns, which takes longer to begin and to end:
/// up to so many keys, for rows that do not fill the GPU for long. With a diagonal or few rows it leaves out more than the
/// other family does. Where the lines lie was fitted to 390 problems of 16 to 2048 rows, 16 to 2048 keys and 1 to 256 heads
/// on an H200: benches/record/2026-11-30-hopper.md.
fn is_small(params: &AttnParams, head_dim: usize) -> bool {
    const FEW_ROWS: usize = 64;
    const FEW_MULTIPLY_ADDS: usize = 3 << 27; // of q·k
    let few_keys = match head_dim {
        97..=128 => 64,
        _ if params.seqlen_q > FEW_ROWS && params.mask.window_right().is_none() => 256,
        ..=64 => 192,
        _ => 128,
    };
    params.seqlen_k <= few_keys
        && params.batch * params.num_heads * params.seqlen_q * params.seqlen_k * head_dim
            <= FEW_MULTIPLY_ADDS
}

/// As [`forward`].
pub(super) fn backward(gpu: &Gpu, params: &AttnParams) -> Option<Chosen<BwdParams>> {
    choose(backward_rows(), gpu, params.head_dim, is_plain(params))
}

/// Whether scores are `q·k` times a positive factor; `ScoreMode::PLAIN` of kernels/params.h.
fn is_plain(params: &AttnParams) -> bool {
    params.softmax_scale as f32 >= ffi::MIN_PLAIN_SCALE
        && params.softcap.is_none()
        && params.alibi_slopes.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(compute_capability: (i32, i32), shared_kib: usize) -> Gpu {
        Gpu {
            compute_capability,
            multiprocessors: 100,
            shared_kib,
            sm90: match compute_capability {
                (9, 0) => Sm90::WhereFaster,
                _ => Sm90::Nowhere,
            },
        }
    }

    #[test]
    fn every_gpu_from_ampere_on_has_kernels_for_every_multiple_of_8_up_to_256() {
        for gpu in [
            gpu((8, 0), 163),
            gpu((8, 6), 99),
            gpu((9, 0), 227),
            gpu((12, 0), 99),
        ] {
            for head_dim in 0..300 {
                let expected = head_dim > 0 && head_dim % 8 == 0 && head_dim <= 256;
                for dtype in DTYPES {
                    assert_eq!(is_supported(&gpu, dtype, head_dim), expected, "{head_dim}");
                }
                assert!(!is_supported(&gpu, DType::F32, head_dim));
            }
        }
        assert!(!is_supported(&gpu((7, 5), 99), DType::F16, 64));
    }

    #[test]
    fn variables_of_the_environment_are_understood_or_refused() {
        let value = |value: &str| Some(OsString::from(value));
        assert_eq!(shared_limit(None).unwrap(), usize::MAX);
        assert_eq!(shared_limit(value("99")).unwrap(), 99);
        assert_eq!(sm90(None).unwrap(), Sm90::WhereFaster);
        assert_eq!(sm90(value("sm80")).unwrap(), Sm90::Nowhere);
        assert_eq!(sm90(value("sm90")).unwrap(), Sm90::WhereverTheyCan);
        for (error, got) in [
            (shared_limit(value("99K")).unwrap_err(), "\"99K\""),
            (sm90(value("SM80")).unwrap_err(), "\"SM80\""),
        ] {
            let error = error.to_string();
            assert!(error.contains("must be") && error.contains(got), "{error}");
        }
    }

    #[test]
    fn rows_hold_what_their_kernels_need() {
        for (name, kib, bytes) in forward_rows()
            .map(|row| (row.name, row.shared_kib, row.kernel.shared_bytes))
            .chain(backward_rows().map(|row| (row.name, row.shared_kib, row.kernel.shared_bytes)))
        {
            println!("{name}: {bytes} bytes of shared memory a block");
            assert!(bytes > 0 && bytes as usize <= kib << 10, "{name}: {bytes}");
        }
        for row in backward_rows() {
            for tile in [row.kernel.tile_m, row.kernel.tile_n] {
                assert_eq!(ffi::ROW_PADDING % tile as usize, 0, "{}", row.name);
            }
        }
    }

    #[test]
    fn the_best_row_comes_first() {
        let name = |gpu: Gpu, head_dim, plain| {
            choose(backward_rows(), &gpu, head_dim, plain).map(|row| row.name)
        };
        let without_hoppers = Gpu {
            sm90: Sm90::Nowhere,
            ..gpu((9, 0), 227)
        };
        assert_eq!(
            name(without_hoppers, 128, true),
            Some("flash_bwd_sm80_hd128_smem163")
        );
        assert_eq!(
            name(without_hoppers, 40, true),
            Some("flash_bwd_keys_sm80_hd64_smem99")
        );
        assert_eq!(
            name(without_hoppers, 40, false),
            Some("flash_bwd_sm80_hd64_smem99")
        );
        assert_eq!(
            name(gpu((8, 6), 99), 200, true),
            Some("flash_bwd_sm80_hd256_smem99")
        );
    }

    #[test]
    fn kernels_for_hopper_run_plain_problems_there_and_nothing_else() {
        let forward = |gpu: Gpu, plain| choose(forward_rows(), &gpu, 72, plain).map(|row| row.name);
        let backward =
            |gpu: Gpu, plain| choose(backward_rows(), &gpu, 200, plain).map(|row| row.name);
        let hopper = gpu((9, 0), 227);
        assert_eq!(forward(hopper, true), Some("flash_fwd_sm90_hd96_smem227"));
        assert_eq!(
            backward(hopper, true),
            Some("flash_bwd_wide_sm90_hd256_smem227")
        );
        for (gpu, plain) in [
            (hopper, false),
            (gpu((10, 0), 227), true),
            (gpu((9, 0), 163), true),
        ] {
            let names = [forward(gpu, plain), backward(gpu, plain)];
            assert!(
                names.iter().all(|name| name.unwrap().contains("_sm80_")),
                "{names:?}"
            );
        }
    }

    #[test]
    fn small_forwards_run_on_hopper_what_is_faster_there() {
        use crate::mask::Mask;
        let name = |sm90, [num_heads, seqlen_q, seqlen_k, head_dim]: [usize; 4], causal| {
            let params = AttnParams {
                batch: 1,
                seqlen_q,
                seqlen_k,
                num_heads,
                num_kv_heads: num_heads,
                head_dim,
                softmax_scale: 1.,
                softcap: None,
                alibi_slopes: None,
                deterministic: false,
                mask: Mask::new(seqlen_q, seqlen_k, causal, None, None),
            };
            let gpu = Gpu {
                sm90,
                ..gpu((9, 0), 227)
            };
            forward(&gpu, &params).unwrap().name
        };
        for (shape, causal, sm80) in [
            // Measured: microseconds with Hopper's forward, with the other.
            ([1, 64, 64, 64], false, true),      // 4.7, 3.9
            ([256, 128, 128, 64], false, true),  // 10.2, 7.5
            ([1, 16, 256, 64], false, false),    // 5.5, 7.0
            ([32, 256, 256, 64], false, true),   // 8.7, 7.4
            ([32, 256, 256, 64], true, false),   // 7.2, 7.9
            ([1, 384, 384, 64], false, false),   // 9.0, 9.3
            ([256, 512, 128, 64], false, false), // 24.3, 27.2
            ([256, 128, 128, 96], false, true),  // 14.6, 10.1
            ([1, 256, 256, 96], false, true),    // 9.8, 9.1
            ([1, 256, 256, 96], true, false),    // 8.2, 10.2
            ([32, 64, 64, 128], false, true),    // 6.4, 6.0
            ([1, 128, 128, 128], false, false),  // 6.2, 6.9
            ([256, 64, 64, 192], false, true),   // 11.8, 8.2
            ([1, 16, 256, 192], false, false),   // 7.7, 9.1
            ([1, 256, 256, 192], false, true),   // 10.5, 9.4
            ([1, 128, 128, 256], false, true),   // 8.7, 7.6
            ([1, 192, 192, 256], true, false),   // 8.3, 9.5
            ([256, 128, 64, 256], false, false), // 16.1, 22.0
            ([32, 384, 384, 256], false, false), // 14.5, 24.3
        ] {
            let runs_sm80 = |sm90| name(sm90, shape, causal).contains("_sm80_");
            assert_eq!(runs_sm80(Sm90::WhereFaster), sm80, "{shape:?}");
            assert!(!runs_sm80(Sm90::WhereverTheyCan), "{shape:?}");
            assert!(runs_sm80(Sm90::Nowhere), "{shape:?}");
        }
    }

    /// The twins of kernels/params.h have not drifted.
    #[test]
    fn structs_have_the_layout_of_the_kernels() {
        use std::mem::{offset_of, size_of};
        let ours = [
            size_of::<ffi::Strides>(),
            size_of::<ffi::AttnProblem>(),
            offset_of!(ffi::AttnProblem, q_strides),
            offset_of!(ffi::AttnProblem, batch),
            offset_of!(ffi::AttnProblem, softmax_scale),
            offset_of!(ffi::AttnProblem, tanh_scale),
            offset_of!(ffi::AttnProblem, element),
            size_of::<FwdParams>(),
            offset_of!(FwdParams, next_piece),
            size_of::<BwdParams>(),
            offset_of!(BwdParams, lse),
            offset_of!(BwdParams, next_piece),
            offset_of!(BwdParams, group_parts),
            size_of::<ffi::ConvertParams>(),
            offset_of!(ffi::ConvertParams, parts),
            offset_of!(ffi::ConvertParams, element),
            size_of::<Kernel<FwdParams>>(),
            offset_of!(Kernel<FwdParams>, tile_n),
            ffi::ROW_PADDING,
            ffi::MAX_WINDOW as usize,
            ffi::ROWS_PER_TURN,
        ];
        let mut theirs = [0; 21];
        // SAFETY: it writes exactly as many numbers as kernels/common/layout.cu lists, 21.
        unsafe { ffi::flash_layout(theirs.as_mut_ptr()) };
        assert_eq!(ours, theirs);
    }
}
