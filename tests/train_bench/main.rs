//! What `--example train_bench` counts and decides.

#[path = "../../examples/train_bench/longest.rs"]
mod longest;
#[path = "../../examples/common/model/mod.rs"]
#[expect(dead_code, reason = "only shapes are needed")]
mod model;
#[path = "../../examples/common/out_of_memory.rs"]
mod out_of_memory;
#[path = "../../examples/train_bench/shapes.rs"]
mod shapes;

use anyhow::anyhow;
use clap::ValueEnum;

use model::{Attention, weight_shapes};
use out_of_memory::is_out_of_memory;
use shapes::{Case, Shape, operations};

fn matrix_weights(shape: Shape, seqlen: usize) -> usize {
    let shapes = weight_shapes(&shape.config(seqlen));
    let matrices = shapes.iter().filter(|(_, dims)| dims.len() > 1);
    matrices
        .map(|(_, dims)| dims.iter().product::<usize>())
        .sum()
}

/// In millions: by the sizes of `Shape::config` on paper. The models are named 1.3 and 2.7 billion, and Llama-3.2-1B's
/// card says 1.23.
#[test]
fn shapes_have_the_numbers_of_weights_that_they_are_named_by() {
    for (shape, millions) in [
        (Shape::Gpt3Xl, 1317.3),
        (Shape::Gpt3Large, 2666.3),
        (Shape::Llama32, 1235.7),
    ] {
        let weights = matrix_weights(shape, 2048) as f64 / 1e6;
        assert!((weights - millions).abs() < 0.1, "{shape}: {weights}");
    }
}

/// A row of benches/record: 24 blocks of 2048, 1.3173e9 weights, 47,658 tokens a second at context 2048.
#[test]
fn operations_are_six_for_each_weight_and_those_of_causal_attention() {
    let config = Shape::Gpt3Xl.config(2048);
    let weights = matrix_weights(Shape::Gpt3Xl, 2048);
    let tflops = operations(&config, weights, 2048, 47_658) / 1e12;
    let expected = 47_658. * (6. * 1.3173e9 + 12. * 24. * 2048. * 2048. / 2.) / 1e12;
    assert!((tflops - expected).abs() < 0.1, "{tflops} and {expected}");
    assert!((tflops - 405.5).abs() < 0.5, "{tflops}");
    // Twice the context: the attention's part alone doubles.
    let longer = operations(&Shape::Gpt3Xl.config(4096), weights, 4096, 47_658) / 1e12;
    let attention = 47_658. * 6. * 24. * 2048. * 2048. / 1e12;
    assert!((longer - tflops - attention).abs() < 0.1, "{longer}");
}

#[test]
fn a_gpu_without_room_is_told_from_other_errors() {
    for (message, expected) in [
        (
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
            true,
        ),
        ("CublasError(CUBLAS_STATUS_ALLOC_FAILED)", true),
        (
            "flash_attn: kernel failed: an illegal memory access was encountered",
            false,
        ),
        ("CublasError(CUBLAS_STATUS_NOT_SUPPORTED)", false),
    ] {
        let error = anyhow!(message.to_string()).context("a step");
        assert_eq!(is_out_of_memory(&error), expected, "{message}");
    }
}

#[test]
fn the_longest_context_is_found_to_the_unit() {
    for unit in [1, 7, 1024] {
        for longest_units in [0, 1, 2, 3, 5, 8, 31, 64, 100, 1000] {
            let most = 100 * unit + unit / 2;
            let mut tried = 0;
            let found = longest::longest(unit, most, |seqlen| {
                tried += 1;
                assert!(seqlen % unit == 0 && seqlen <= most, "{seqlen}");
                Ok(seqlen <= longest_units * unit)
            });
            let expected = (longest_units > 0).then(|| longest_units.min(100) * unit);
            assert_eq!(found.unwrap(), expected, "unit {unit}, {longest_units}");
            assert!(tried <= 15, "{tried}");
        }
    }
    assert_eq!(longest::longest(8, 7, |_| Ok(true)).unwrap(), None);
    assert!(longest::longest(1, 9, |_| Err(anyhow!("broken"))).is_err());
}

/// Names of the command line.
#[test]
fn cases_are_named_as_in_the_records() {
    let shapes = Shape::value_variants().iter().map(Shape::to_string);
    assert_eq!(
        shapes.collect::<Vec<_>>(),
        ["gpt3-1.3b", "gpt3-2.7b", "llama-3.2-1b", "tiny"]
    );
    let case = Case {
        shape: Shape::Tiny,
        attention: Attention::Plain,
        seqlen: 64,
    };
    assert_eq!(case.shape.config(case.seqlen).max_position_embeddings, 64);
    assert_eq!(case.attention.to_string(), "plain");
}
