//! The command line, and `--compare`.

use std::io::{self, ErrorKind, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;

use crate::args::Args;
use crate::compare::{compare, seconds_after_the_first};
use crate::options::Options;
use crate::output::Output;
use crate::setup;

fn refusal(args: &[&str]) -> String {
    let args = [&["finetune"], args].concat();
    let refused = Args::try_parse_from(args).err();
    refused.map_or(String::new(), |error| error.to_string())
}

#[test]
fn a_resumed_run_takes_neither_options_nor_a_comparison() {
    for flags in [
        ["--compare", "3"],
        ["--lr", "1e-4"],
        ["--clip", "0.5"],
        ["--out", "elsewhere"],
    ] {
        let message = refusal(&[&["--resume", "run"], &flags[..]].concat());
        assert!(
            message.contains("--resume <DIR>' cannot be used with") && message.contains(flags[0]),
            "{message}"
        );
    }
    assert_eq!(refusal(&["--resume", "run", "--save-every", "5"]), "");
    assert_eq!(refusal(&["--out", "run", "--compare", "3"]), "");
}

/// Fails as what is written to whoever has gone away.
struct Failing(ErrorKind);

impl Write for Failing {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(self.0.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(self.0.into())
    }
}

#[test]
fn a_run_goes_on_when_nobody_reads_what_it_prints() {
    let mut unread = Output(Failing(ErrorKind::BrokenPipe));
    assert!(writeln!(unread, "step 0").is_ok() && unread.flush().is_ok());
    let mut full = Output(Failing(ErrorKind::StorageFull));
    assert!(writeln!(full, "step 0").is_err() && full.flush().is_err());
}

#[test]
fn the_first_step_is_left_out_of_the_time() {
    let start = Instant::now();
    let ends = |seconds: &[u64]| -> Vec<Instant> {
        let ends = seconds.iter().map(|&s| start + Duration::from_secs(s));
        ends.collect()
    };
    assert_eq!(seconds_after_the_first(&ends(&[])), None);
    assert_eq!(seconds_after_the_first(&ends(&[100])), None);
    let seconds = seconds_after_the_first(&ends(&[100, 102, 106]));
    assert_eq!(seconds, Some(3.));
}

/// What `--compare` prints.
fn compared(options: &Options, steps: usize) -> Result<String> {
    let checkpoint = setup::checkpoint(options)?;
    let mut out = vec![];
    let trainer = |attention| setup::trainer(options, &checkpoint, attention);
    compare(steps, trainer, &mut out)?;
    Ok(String::from_utf8(out)?)
}

#[test]
fn a_comparison_says_what_its_times_are() -> Result<()> {
    let options = setup::options(&[]);
    for (steps, expected) in [
        (1, "  no time: the only step is the first, which warms up\n"),
        (3, " s a step, without the first, which warms up\n"),
    ] {
        let printed = compared(&options, steps)?;
        assert_eq!(printed.matches(expected).count(), 2, "{printed}");
        assert!(printed.contains("flash  ") && printed.contains("plain  "));
    }
    Ok(())
}

#[test]
fn a_comparison_that_breaks_says_what_to_change() {
    let options = setup::options(&["--lr", "1e15", "--clip", "1e30", "--warmup", "0"]);
    let message = format!("{:#}", compared(&options, 3).expect_err("it is NaN"));
    let expected =
        "cannot compare, start again with a lower --lr or --clip: step 2: the loss is NaN";
    assert!(message.starts_with(expected), "{message}");
}
