//! What `--example train_bench` counts and decides, and which rows `--example bench` times.

#[path = "../../examples/train_bench/args.rs"]
mod args;
#[path = "../../examples/train_bench/bench.rs"]
mod bench;
#[path = "../../examples/common/cli.rs"]
#[expect(dead_code, reason = "only the names of devices are needed")]
mod cli;
#[path = "../../examples/common/gpu_memory.rs"]
mod gpu_memory;
#[path = "../../examples/train_bench/largest_batch.rs"]
mod largest_batch;
#[path = "../../examples/train_bench/longest.rs"]
mod longest;
#[path = "../../examples/common/model/mod.rs"]
#[expect(dead_code, reason = "training has no cache of keys and values")]
mod model;
#[path = "../../examples/common/numbers.rs"]
#[expect(dead_code, reason = "none of the numbers here may be 0")]
mod numbers;
#[path = "../../examples/common/out_of_memory.rs"]
mod out_of_memory;
#[path = "../../examples/train_bench/profile.rs"]
#[expect(dead_code, reason = "parts are only timed")]
mod profile;
#[path = "../../examples/train_bench/report.rs"]
#[expect(dead_code, reason = "nothing is printed here")]
mod report;
#[path = "../../examples/bench/rows.rs"]
#[expect(dead_code, reason = "rows are chosen here and not timed")]
mod rows;
#[path = "../../examples/train_bench/shapes.rs"]
mod shapes;
#[path = "../../examples/train_bench/step.rs"]
mod step;
#[path = "../../examples/common/training/mod.rs"]
#[expect(dead_code, reason = "nothing is saved here")]
mod training;

use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use clap::{Parser, ValueEnum};
use serde_json::Value;

use args::Args;
use bench::Row;
use largest_batch::largest_batch;
use longest::{Found, longest};
use model::{Attention, weight_shapes};
use out_of_memory::is_out_of_memory;
use report::Report;
use rows::Rows;
use shapes::{Case, Rates, Shape, operations};

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
fn the_longest_context_is_found_to_the_unit() -> Result<()> {
    for unit in [1, 7, 1024] {
        for longest_units in [0, 1, 2, 3, 5, 8, 31, 64, 99, 100, 1000] {
            let most = 100 * unit + unit / 2;
            let mut tried = 0;
            let found = longest(unit, most, |seqlen| {
                tried += 1;
                assert!(seqlen % unit == 0 && seqlen <= most, "{seqlen}");
                Ok(seqlen <= longest_units * unit)
            })?;
            let expected = Found {
                seqlen: (longest_units > 0).then(|| longest_units.min(100) * unit),
                ended_at_most: longest_units >= 100,
            };
            assert_eq!(found, expected, "unit {unit}, {longest_units}");
            assert!(tried <= 15, "{tried}");
        }
    }
    let untried = Found {
        seqlen: None,
        ended_at_most: true,
    };
    assert_eq!(longest(8, 7, |_| Ok(true))?, untried);
    assert!(longest(1, 9, |_| Err(anyhow!("broken"))).is_err());
    Ok(())
}

/// The arguments after `--longest N`, or what is said to them.
fn search(more: &[&str]) -> Result<Args> {
    args(&[&["--longest"], more].concat())
}

#[test]
fn a_search_has_one_end_that_it_can_reach() -> Result<()> {
    assert_eq!(search(&["512"])?.seqlen, [4096]);
    assert_eq!(search(&["512", "--seqlen", "512"])?.seqlen, [512]);
    for (more, expected) in [
        (
            &["513", "--seqlen", "512"][..],
            "--longest 513 is more than --seqlen 512",
        ),
        (&["4097"], "--longest 4097 is more than --seqlen 4096"),
        (
            &["8", "--seqlen", "512,1024"],
            "--longest takes one --seqlen, where its search ends, got 2",
        ),
        (&["8", "--steps", "2"], "cannot be used with"),
        (&["8", "--tokens", "64"], "cannot be used with"),
        (&["8", "--micro-tokens", "64"], "cannot be used with"),
        (&["8", "--profile"], "cannot be used with"),
    ] {
        let message = search(more).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message}");
    }
    Ok(())
}

#[test]
fn batches_are_halved_until_one_fits() -> Result<()> {
    let out_of_memory = || anyhow!("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
    for (room, tried, fits) in [
        (100, &[13][..], Some(13)),
        (5, &[13, 6, 3], Some(3)),
        (1, &[8, 4, 2, 1], Some(1)),
        (0, &[13, 6, 3, 1], None),
    ] {
        let mut seen = vec![];
        // By an error, and by no result before anything is tried.
        let found = largest_batch(tried[0], |batch| {
            seen.push(batch);
            match batch <= room {
                true => Ok(Some(batch)),
                false if batch == 6 => Ok(None),
                false => Err(out_of_memory().context("a step")),
            }
        })?;
        assert_eq!((found, &seen[..]), (fits, tried), "room for {room}");
    }
    let mut tries = 0;
    let broken = largest_batch(8, |_| -> Result<Option<()>> {
        tries += 1;
        Err(anyhow!("an illegal memory access was encountered"))
    });
    assert!(broken.is_err_and(|error| error.to_string().contains("illegal")));
    assert_eq!(tries, 1);
    Ok(())
}

/// By hand, for two blocks of width 64 with 4/2 heads, an MLP of 192 and 512 tokens: 131,072 weights; 2 x 2 x 64 tokens
/// are 6 x 131,072 x 256 operations of weights and 12 x 2 x 64 x 64 x 256 / 2 of attention.
#[test]
fn rates_count_the_tokens_of_every_micro_batch() {
    let config = Shape::Tiny.config(64);
    let weights = matrix_weights(Shape::Tiny, 64);
    assert_eq!(weights, 131_072);
    assert_eq!(operations(&config, weights, 64, 256), 213_909_504.);
    let rates = Rates::of(&config, weights, [2, 2, 64], 0.5);
    assert_eq!(rates.tokens_per_second, 512.);
    assert!((rates.tflops - 427_819_008e-12).abs() < 1e-15, "{rates:?}");
}

/// The arguments after the command's name, with what they leave out.
fn args(more: &[&str]) -> Result<Args> {
    Args::try_parse_from([&["train_bench"], more].concat())?.completed(&Device::Cpu)
}

fn tiny(seqlen: usize) -> Case {
    Case {
        shape: Shape::Tiny,
        attention: Attention::Flash,
        seqlen,
    }
}

#[test]
fn a_row_has_the_tokens_that_were_asked_for_and_their_speed() -> Result<()> {
    let args = args(&["--tokens", "256", "--micro-tokens", "128", "--steps", "1"])?;
    let row = bench::run(tiny(64), &args, &Device::Cpu)?;
    let figures = row.figures.context("it fits")?;
    assert_eq!((figures.micro_batches, figures.batch), (2, 2));
    let tokens = figures.rates.tokens_per_second * figures.seconds_per_step;
    assert!((tokens - 256.).abs() < 1e-6, "{tokens}");
    let operations = figures.rates.tflops * figures.seconds_per_step * 1e12;
    assert!((operations - 213_909_504.).abs() < 1., "{operations}");
    // ln(512) is that of a model that knows nothing.
    assert!((figures.loss - 6.24).abs() < 0.2, "{}", figures.loss);
    assert!(figures.peak_bytes.is_none() && !row.at_least);
    Ok(())
}

#[test]
fn a_search_that_ended_at_its_end_says_so() -> Result<()> {
    let (table, json) = (search(&["32"])?, search(&["32", "--json"])?);
    let lines = |row: &Row| [&table, &json].map(|args| Report::new(args).line(row));
    let mut row = bench::run(tiny(32), &table, &Device::Cpu)?;
    let figures = row.figures.as_ref().context("it fits")?;
    assert_eq!((figures.micro_batches, figures.batch), (1, 1));
    for at_least in [false, true] {
        row.at_least = at_least;
        let [line, json] = lines(&row);
        let note = line.ends_with("  and more: the search ended there");
        assert_eq!(note, at_least, "{line}");
        let json: Value = serde_json::from_str(&json)?;
        assert_eq!(json["at_least"] == Value::Bool(true), at_least, "{json}");
        assert_eq!(json["seqlen"], 32);
    }
    row.figures = None;
    let [line, json] = lines(&row);
    assert!(line.ends_with("out of memory") && json.contains("\"out_of_memory\":true"));
    Ok(())
}

#[test]
fn there_is_no_share_of_a_peak_that_is_not_known() -> Result<()> {
    let size = ["--tokens", "32", "--steps", "1"];
    let row = bench::run(tiny(32), &args(&size)?, &Device::Cpu)?;
    let line = |more: &[&str]| -> Result<String> { Ok(Report::new(&args(more)?).line(&row)) };
    // In a row the share is before the memory and the loss.
    let share = |line: &str| line.split_whitespace().rev().nth(2).map(String::from);
    assert_eq!(share(&line(&[])?).as_deref(), Some("-"));
    let json: Value = serde_json::from_str(&line(&["--json"])?)?;
    assert!(json["share_of_peak"].is_null() && json["tflops"].is_number());

    let tflops = json["tflops"].as_f64().context("tflops")?;
    let expected = format!("{:.3}", tflops / 0.5);
    assert_eq!(share(&line(&["--peak", "0.5"])?), Some(expected));
    let json: Value = serde_json::from_str(&line(&["--peak", "0.5", "--json"])?)?;
    let share = json["share_of_peak"].as_f64().context("share")?;
    assert!((share * 0.5 / tflops - 1.).abs() < 1e-12, "{json}");
    Ok(())
}

#[test]
fn negative_numbers_are_refused_by_name() {
    for (flag, expected) in [
        ("--seqlen", "expected a whole number of at least 1"),
        ("--tokens", "expected a whole number of at least 1"),
        ("--micro-tokens", "expected a whole number of at least 1"),
        ("--steps", "expected a whole number of at least 1"),
        ("--longest", "expected a whole number of at least 1"),
        ("--peak", "must be a number above 0, got -1"),
    ] {
        let message = args(&[flag, "-1"]).expect_err(flag).to_string();
        assert!(
            message.contains(flag) && message.contains(expected),
            "{message}"
        );
    }
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

#[test]
fn a_length_that_no_row_has_is_refused() -> Result<()> {
    let sets = [Rows::Gqa, Rows::Tiny];
    assert_eq!(rows::chosen(&sets, None)?.len(), 9);
    let chosen = rows::chosen(&sets, Some(8192))?;
    assert!(chosen.len() == 3 && chosen.iter().all(|row| row.seqlen_k == 8192));
    let message = rows::chosen(&sets, Some(777)).expect_err("777").to_string();
    let expected = "--length 777: no row has that many keys, expected one of {16, 2048, 4096, 8192";
    assert!(message.starts_with(expected), "{message}");
    Ok(())
}
