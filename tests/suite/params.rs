//! Every user error: found before any work, with what was got and what was expected.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_flash_gqa::{
    AttnOptions, flash_attn, flash_attn_with, flash_attn_with_lse, is_supported, reference,
};

use crate::support::compare::{identical, identical_passes};
use crate::support::device::{FLOATS, devices, for_each_device, for_each_dtype};
use crate::support::problem::Problem;
use crate::support::run;
use crate::support::tensors::Inputs;

/// A call that must be refused, and what the message must hold.
struct Refused {
    name: &'static str,
    q: &'static [usize],
    k: &'static [usize],
    v: &'static [usize],
    dtypes: [DType; 3],
    options: fn(&Device) -> Result<AttnOptions>,
    message: &'static [&'static str],
    /// Whether it takes the values of a tensor, which are read on the CPU only.
    by_value: bool,
}

/// A call of good shapes and options.
const GOOD: Refused = Refused {
    name: "",
    q: &[2, 3, 6, 8],
    k: &[2, 5, 2, 8],
    v: &[2, 5, 2, 8],
    dtypes: [DType::BF16; 3],
    options: |_| Ok(AttnOptions::default()),
    message: &[],
    by_value: false,
};

const SHAPES: &[Refused] = &[
    Refused {
        name: "q of rank 3",
        q: &[3, 6, 8],
        message: &["q must have 4 dimensions", "[3, 6, 8]"],
        ..GOOD
    },
    Refused {
        name: "k of rank 5",
        k: &[1, 2, 5, 2, 8],
        message: &["k must have 4 dimensions", "[1, 2, 5, 2, 8]"],
        ..GOOD
    },
    Refused {
        name: "v of rank 0",
        v: &[],
        message: &["v must have 4 dimensions", "[]"],
        ..GOOD
    },
    Refused {
        name: "k and v of different lengths",
        v: &[2, 4, 2, 8],
        message: &["k and v", "[2, 5, 2, 8]", "[2, 4, 2, 8]"],
        ..GOOD
    },
    Refused {
        name: "case 31: v of another head_dim",
        v: &[2, 5, 2, 16],
        message: &["k and v", "[2, 5, 2, 8]", "[2, 5, 2, 16]"],
        ..GOOD
    },
    Refused {
        name: "v of another number of heads",
        v: &[2, 5, 1, 8],
        message: &["k and v", "[2, 5, 2, 8]", "[2, 5, 1, 8]"],
        ..GOOD
    },
    Refused {
        name: "another batch",
        k: &[1, 5, 2, 8],
        v: &[1, 5, 2, 8],
        message: &["batch size of q (2)", "got 1"],
        ..GOOD
    },
    Refused {
        name: "another head_dim",
        k: &[2, 5, 2, 4],
        v: &[2, 5, 2, 4],
        message: &["head_dim of q (8)", "got 4"],
        ..GOOD
    },
    Refused {
        name: "case 47: 6 heads on 4",
        k: &[2, 5, 4, 8],
        v: &[2, 5, 4, 8],
        message: &["multiple", "num_heads 6", "num_kv_heads 4"],
        ..GOOD
    },
    Refused {
        name: "case 47: 2 heads on 4",
        q: &[2, 3, 2, 8],
        k: &[2, 5, 4, 8],
        v: &[2, 5, 4, 8],
        message: &["multiple", "num_heads 2", "num_kv_heads 4"],
        ..GOOD
    },
    Refused {
        name: "case 47: no key/value heads",
        k: &[2, 5, 0, 8],
        v: &[2, 5, 0, 8],
        message: &["positive multiple", "num_heads 6", "num_kv_heads 0"],
        ..GOOD
    },
    Refused {
        name: "no heads at all",
        q: &[2, 3, 0, 8],
        message: &["positive multiple", "num_heads 0", "num_kv_heads 2"],
        ..GOOD
    },
    Refused {
        name: "head_dim 0",
        q: &[2, 3, 6, 0],
        k: &[2, 5, 2, 0],
        v: &[2, 5, 2, 0],
        message: &["head_dim must be at least 1", "got 0"],
        ..GOOD
    },
];

const DTYPES: &[Refused] = &[
    Refused {
        name: "case 69: q bf16 and k f16",
        dtypes: [DType::BF16, DType::F16, DType::BF16],
        message: &["same dtype", "q BF16", "k F16", "v BF16"],
        ..GOOD
    },
    Refused {
        name: "v of another dtype",
        dtypes: [DType::BF16, DType::BF16, DType::F64],
        message: &["same dtype", "q BF16", "k BF16", "v F64"],
        ..GOOD
    },
    Refused {
        name: "case 69: bytes",
        dtypes: [DType::U8; 3],
        message: &["no kernel for dtype U8", "head_dim 8", "F16", "BF16"],
        ..GOOD
    },
    Refused {
        name: "case 69: 32-bit integers",
        dtypes: [DType::U32; 3],
        message: &["no kernel for dtype U32"],
        ..GOOD
    },
    Refused {
        name: "case 69: 64-bit integers",
        dtypes: [DType::I64; 3],
        message: &["no kernel for dtype I64"],
        ..GOOD
    },
];

const OPTIONS: &[Refused] = &[
    Refused {
        name: "scale NaN",
        options: |_| Ok(scale(f32::NAN)),
        message: &["softmax_scale must be finite", "NaN"],
        ..GOOD
    },
    Refused {
        name: "scale infinite",
        options: |_| Ok(scale(f32::NEG_INFINITY)),
        message: &["softmax_scale must be finite", "-inf"],
        ..GOOD
    },
    Refused {
        name: "softcap 0",
        options: |_| Ok(softcap(0.)),
        message: &["softcap must be finite and above 0", "got 0"],
        ..GOOD
    },
    Refused {
        name: "softcap negative",
        options: |_| Ok(softcap(-2.)),
        message: &["softcap must be finite and above 0", "got -2"],
        ..GOOD
    },
    Refused {
        name: "softcap infinite",
        options: |_| Ok(softcap(f32::INFINITY)),
        message: &["softcap must be finite and above 0", "inf"],
        ..GOOD
    },
    Refused {
        name: "softcap NaN",
        options: |_| Ok(softcap(f32::NAN)),
        message: &["softcap must be finite and above 0", "NaN"],
        ..GOOD
    },
    Refused {
        name: "scale above 1e30",
        options: |_| Ok(scale(1.1e30)),
        message: &["softmax_scale", "1e30", "got 1.1e30"],
        ..GOOD
    },
    Refused {
        name: "scale below -1e30",
        options: |_| Ok(scale(-f32::MAX)),
        message: &["softmax_scale", "1e30", "got -3.4028235e38"],
        ..GOOD
    },
    Refused {
        name: "softcap far below the default scale",
        options: |_| Ok(softcap(f32::MIN_POSITIVE)),
        message: &["softcap", "softmax_scale", "1e30", "1.1754944e-38"],
        ..GOOD
    },
    Refused {
        name: "softcap far below the scale",
        options: |_| Ok(scale_and_softcap(-1e20, 9e-11)),
        message: &["softcap", "softmax_scale", "1e30", "9e-11"],
        ..GOOD
    },
    Refused {
        name: "slopes in f64",
        options: |device| slopes(&[6], DType::F64, 1., device),
        message: &["alibi_slopes must be F32", "F64"],
        ..GOOD
    },
    Refused {
        name: "slopes of the key/value heads",
        options: |device| slopes(&[2], DType::F32, 1., device),
        message: &["alibi_slopes must have shape (6) or (2, 6)", "[2]"],
        ..GOOD
    },
    Refused {
        name: "slopes of another batch",
        options: |device| slopes(&[3, 6], DType::F32, 1., device),
        message: &["alibi_slopes must have shape (6) or (2, 6)", "[3, 6]"],
        ..GOOD
    },
    Refused {
        name: "slopes of rank 3",
        options: |device| slopes(&[1, 2, 6], DType::F32, 1., device),
        message: &["alibi_slopes must have shape (6) or (2, 6)", "[1, 2, 6]"],
        ..GOOD
    },
    Refused {
        name: "slopes NaN",
        by_value: true,
        options: |device| slopes(&[2, 6], DType::F32, f64::NAN, device),
        message: &["alibi_slopes must be finite", "NaN"],
        ..GOOD
    },
    Refused {
        name: "slopes infinite",
        by_value: true,
        options: |device| slopes(&[6], DType::F32, f64::INFINITY, device),
        message: &["alibi_slopes must be finite", "inf"],
        ..GOOD
    },
    Refused {
        name: "slopes above 1e30",
        by_value: true,
        options: |device| slopes(&[6], DType::F32, 1.1e30, device),
        message: &["alibi_slopes", "1e30", "got 1.1e30"],
        ..GOOD
    },
    Refused {
        name: "slopes below -1e30",
        by_value: true,
        options: |device| slopes(&[2, 6], DType::F32, -1.1e30, device),
        message: &["alibi_slopes", "1e30", "got -1.1e30"],
        ..GOOD
    },
];

fn scale(softmax_scale: f32) -> AttnOptions {
    AttnOptions {
        softmax_scale: Some(softmax_scale),
        ..AttnOptions::default()
    }
}

fn softcap(softcap: f32) -> AttnOptions {
    AttnOptions {
        softcap: Some(softcap),
        ..AttnOptions::default()
    }
}

fn scale_and_softcap(softmax_scale: f32, cap: f32) -> AttnOptions {
    AttnOptions {
        softmax_scale: Some(softmax_scale),
        ..softcap(cap)
    }
}

fn slopes(dims: &[usize], dtype: DType, value: f64, device: &Device) -> Result<AttnOptions> {
    Ok(AttnOptions {
        alibi_slopes: Some(Tensor::full(value, dims, device)?.to_dtype(dtype)?),
        ..AttnOptions::default()
    })
}

impl Refused {
    fn tensors(&self, device: &Device) -> Result<[Tensor; 3]> {
        let tensor = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, device);
        Ok([
            tensor(self.q, self.dtypes[0])?,
            tensor(self.k, self.dtypes[1])?,
            tensor(self.v, self.dtypes[2])?,
        ])
    }

    /// The message of every function that takes options.
    fn check(&self, device: &Device) -> Result<()> {
        let [q, k, v] = self.tensors(device)?;
        let options = (self.options)(device)?;
        let results = [
            ("flash_attn_with", flash_attn_with(&q, &k, &v, &options)),
            (
                "flash_attn_with_lse",
                flash_attn_with_lse(&q, &k, &v, &options).map(|(out, _)| out),
            ),
            ("reference", reference(&q, &k, &v, &options)),
        ];
        for (function, result) in results {
            let Err(error) = result else {
                anyhow::bail!("{}: {function} did not refuse it", self.name);
            };
            let message = error.to_string();
            for part in ["flash_attn: "].iter().chain(self.message) {
                ensure!(
                    message.contains(part),
                    "{}: {function} says {message:?}, without {part:?}",
                    self.name
                );
            }
        }
        Ok(())
    }
}

fn check_all(table: &[Refused]) -> Result<()> {
    for_each_device(|device| {
        let mut cases = table
            .iter()
            .filter(|case| device.is_cpu() || !case.by_value);
        cases.try_for_each(|case| case.check(device))
    })
}

#[test]
fn shapes_that_do_not_match_are_refused() -> Result<()> {
    check_all(SHAPES)
}

/// Of one number, or none, expanded: none of them takes memory, but results and workspaces would.
#[test]
fn tensors_of_more_numbers_than_buffers_can_have_are_refused() -> Result<()> {
    for_each_device(|device| {
        let one = Tensor::zeros((1, 1, 1, 8), DType::BF16, device)?;
        let none = Tensor::zeros((1, 0, 1, 8), DType::BF16, device)?;
        let expanded = |dims: [usize; 4]| if dims[1] == 0 { &none } else { &one }.expand(&dims);
        let most = [1 << 10, 1 << 21, 1 << 10, 8];
        let empty = [1 << 21, 0, 1 << 20, 8];
        for (name, q, k) in [
            ("q", most, [1 << 10, 1, 1 << 10, 8]),
            ("k", [1 << 10, 1, 1 << 10, 8], most),
            ("q", empty, [1 << 21, 0, 1, 8]),
            ("k", [1 << 21, 0, 1, 8], [1 << 21, 1 << 20, 1, 8]),
        ] {
            let (q, k) = (expanded(q)?, expanded(k)?);
            let error = flash_attn_with(&q, &k, &k, &AttnOptions::default()).unwrap_err();
            let message = error.to_string();
            let expected = format!(
                "{name} must have fewer than 2^44 numbers, a dimension of 0 counted as 1, got shape"
            );
            ensure!(
                message.contains(&expected) && message.contains("2097152"),
                "{message}"
            );
        }
        Ok(())
    })
}

#[test]
fn dtypes_that_differ_or_have_no_kernel_are_refused() -> Result<()> {
    check_all(DTYPES)
}

#[test]
fn options_out_of_range_are_refused() -> Result<()> {
    check_all(OPTIONS)
}

#[test]
fn the_short_call_refuses_what_the_long_one_does() -> Result<()> {
    for_each_device(|device| {
        let [q, k, v] = SHAPES[0].tensors(device)?;
        let message = flash_attn(&q, &k, &v, 1., true).unwrap_err().to_string();
        ensure!(message.contains("[3, 6, 8]"), "{message}");
        let [q, k, v] = GOOD.tensors(device)?;
        let message = flash_attn(&q, &k, &v, f32::NAN, true)
            .unwrap_err()
            .to_string();
        ensure!(message.contains("softmax_scale"), "{message}");
        Ok(())
    })
}

/// The first error in the order of the documentation is the one that is reported.
#[test]
fn of_several_errors_the_first_in_the_documented_order_is_reported() -> Result<()> {
    for_each_device(|device| {
        let all_wrong = Refused {
            name: "rank before head counts before dtypes before options",
            q: &[2, 3, 6, 8],
            k: &[2, 5, 4, 8],
            v: &[2, 5, 4, 8],
            dtypes: [DType::BF16, DType::F64, DType::BF16],
            options: |_| Ok(scale(f32::NAN)),
            message: &["num_kv_heads 4"],
            by_value: false,
        };
        all_wrong.check(device)?;
        let dtype_and_scale = Refused {
            k: GOOD.k,
            v: GOOD.v,
            message: &["same dtype"],
            ..all_wrong
        };
        dtype_and_scale.check(device)
    })
}

#[test]
fn good_calls_at_the_edge_of_what_is_allowed_are_not_refused() -> Result<()> {
    for_each_device(|device| {
        let [q, k, v] = GOOD.tensors(device)?;
        let allowed = [
            scale(0.),
            scale(-3.),
            scale(1e30),
            scale(-1e30),
            softcap(1e-29),
            softcap(f32::MAX),
            scale_and_softcap(-1e20, 1.1e-10),
            scale_and_softcap(0., f32::MIN_POSITIVE),
            slopes(&[6], DType::F32, 1e30, device)?,
            slopes(&[2, 6], DType::F32, -1e30, device)?,
            slopes(&[6], DType::F32, -1., device)?,
            slopes(&[2, 6], DType::F32, 0., device)?,
            AttnOptions {
                window_left: Some(usize::MAX),
                window_right: Some(usize::MAX),
                deterministic: true,
                ..AttnOptions::default()
            },
        ];
        for options in allowed {
            let out = flash_attn_with(&q, &k, &v, &options)?;
            ensure!(out.dims() == GOOD.q, "{options:?}");
        }
        Ok(())
    })
}

#[test]
fn a_softcap_above_1e30_is_off() -> Result<()> {
    for_each_dtype(40, |device, dtype| {
        for seqlen_q in [2, 70] {
            let off = Problem::new(1, [seqlen_q, 130], [4, 2], 40)
                .causal()
                .deterministic();
            let inputs = Inputs::normal(&off, dtype, device, 1)?;
            let expected = run::forward_backward(&off, &inputs)?;
            let (expected_out, expected_lse) = run::forward(&off, &inputs)?;
            for cap in [1.1e30, f32::MAX] {
                let capped = off.clone().softcap(cap);
                let ours = run::forward_backward(&capped, &inputs)?;
                identical_passes("against no softcap", &capped, &ours, &expected)?;
                let (out, lse) = run::forward(&capped, &inputs)?;
                identical("untracked out", &out, &expected_out)?;
                identical("untracked lse", &lse, &expected_lse)?;
            }
        }
        Ok(())
    })
}

#[test]
fn is_supported_tells_whether_a_call_is_refused() -> Result<()> {
    const ALL: [DType; 8] = [
        DType::U8,
        DType::U32,
        DType::I64,
        DType::F8E4M3,
        DType::F16,
        DType::BF16,
        DType::F32,
        DType::F64,
    ];
    for_each_device(|device| {
        for dtype in ALL {
            for head_dim in [1, 2, 7, 64, 72, 128, 256, 257, 1000] {
                let tensor = Tensor::zeros((1, 2, 1, head_dim), dtype, device)?;
                let called = flash_attn(&tensor, &tensor, &tensor, 1., true);
                ensure!(
                    called.is_ok() == is_supported(device, dtype, head_dim),
                    "{dtype:?} at head_dim {head_dim}: {called:?}"
                );
            }
            ensure!(!is_supported(device, dtype, 0));
        }
        Ok(())
    })
}

#[test]
fn every_float_type_and_head_dim_is_supported_on_the_cpu() {
    for device in devices().iter().filter(|device| device.is_cpu()) {
        for dtype in FLOATS {
            assert!((1..=300).all(|head_dim| is_supported(device, dtype, head_dim)));
        }
    }
}
