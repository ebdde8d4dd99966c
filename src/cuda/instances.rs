// The compiled kernels: the single list from which build.rs builds and `dispatch.rs` chooses. Both include
// or use it, so it holds nothing but this macro.

/// Calls `$forward!` and `$backward!` with rows of
/// `file, symbol, head_dim, shared_kib, score modes;`, best first for each head_dim.
///
/// `shared_kib` is the shared memory that a block may need: 227 on Hopper and data-centre Blackwell, 163 on
/// A100, 99 elsewhere from compute capability 8.0 on. Files of `sm90/` are for compute capability 9.0 alone.
macro_rules! instances {
    ($forward:ident, $backward:ident) => {
        $forward! {
            "sm90/forward.cu", flash_fwd_sm90_hd64_smem227, 64, 227, Plain;
            "sm80/forward.cu", flash_fwd_sm80_hd64_smem99, 64, 99, Any;
            "sm90/forward.cu", flash_fwd_sm90_hd96_smem227, 96, 227, Plain;
            "sm80/forward.cu", flash_fwd_sm80_hd96_smem99, 96, 99, Any;
            "sm90/forward.cu", flash_fwd_sm90_hd128_smem227, 128, 227, Plain;
            "sm80/forward.cu", flash_fwd_sm80_hd128_smem227, 128, 227, Plain;
            "sm80/forward.cu", flash_fwd_sm80_hd128_smem99, 128, 99, Any;
            "sm90/forward.cu", flash_fwd_sm90_hd192_smem227, 192, 227, Plain;
            "sm80/forward.cu", flash_fwd_sm80_hd192_smem99, 192, 99, Any;
            "sm90/forward.cu", flash_fwd_sm90_hd256_smem227, 256, 227, Plain;
            "sm80/forward.cu", flash_fwd_sm80_hd256_smem99, 256, 99, Any;
        }
        $backward! {
            "sm90/backward.cu", flash_bwd_sm90_hd64_smem227, 64, 227, Plain;
            "sm80/backward_keys.cu", flash_bwd_keys_sm80_hd64_smem99, 64, 99, Plain;
            "sm80/backward.cu", flash_bwd_sm80_hd64_smem99, 64, 99, Any;
            "sm90/backward.cu", flash_bwd_sm90_hd96_smem227, 96, 227, Plain;
            "sm80/backward.cu", flash_bwd_sm80_hd96_smem163, 96, 163, Any;
            "sm80/backward.cu", flash_bwd_sm80_hd96_smem99, 96, 99, Any;
            "sm90/backward.cu", flash_bwd_sm90_hd128_smem227, 128, 227, Plain;
            "sm80/backward.cu", flash_bwd_sm80_hd128_smem163, 128, 163, Any;
            "sm80/backward.cu", flash_bwd_sm80_hd128_smem99, 128, 99, Any;
            "sm90/backward_wide.cu", flash_bwd_wide_sm90_hd192_smem227, 192, 227, Plain;
            "sm80/backward.cu", flash_bwd_sm80_hd192_smem163, 192, 163, Any;
            "sm80/backward.cu", flash_bwd_sm80_hd192_smem99, 192, 99, Any;
            "sm90/backward_wide.cu", flash_bwd_wide_sm90_hd256_smem227, 256, 227, Plain;
            "sm80/backward.cu", flash_bwd_sm80_hd256_smem227, 256, 227, Any;
            "sm80/backward.cu", flash_bwd_sm80_hd256_smem163, 256, 163, Any;
            "sm80/backward.cu", flash_bwd_sm80_hd256_smem99, 256, 99, Any;
        }
    };
}
