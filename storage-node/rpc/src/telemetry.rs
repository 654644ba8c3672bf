//! Logs: one JSON object a line on standard error, level by `LAMPYRIS_LOG` (default `info`).

use std::env::VarError;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Installs the process's one subscriber; a second call changes nothing. Ends the process with 2,
/// as a wrong flag does, if `LAMPYRIS_LOG` cannot be obeyed.
pub fn init() {
    let filter = match std::env::var("LAMPYRIS_LOG") {
        Ok(text) => filter(&text),
        Err(VarError::NotPresent) => filter("info"),
        Err(VarError::NotUnicode(raw)) => Err(refusal(&raw.to_string_lossy())),
    };
    let filter = filter.unwrap_or_else(|why| {
        eprintln!("error: {why}");
        #[expect(clippy::exit, reason = "as clap does for a wrong flag; nothing was begun yet")]
        std::process::exit(2)
    });
    let subscriber =
        tracing_subscriber::fmt().json().with_env_filter(filter).with_writer(std::io::stderr);
    if subscriber.try_init().is_err() {
        tracing::debug!("the subscriber was installed before");
    }
}

fn filter(text: &str) -> Result<EnvFilter, String> {
    // The parser takes a lone word that is no level for the name of a module, so that a misspelt
    // level would silence everything.
    let is_clear = |part: &str| {
        let part = part.trim();
        part.contains(['=', '[']) || (!part.is_empty() && part.parse::<LevelFilter>().is_ok())
    };
    if !text.contains(';') && text.split(',').all(is_clear) {
        EnvFilter::try_new(text).map_err(|error| format!("{}: {error}", refusal(text)))
    } else {
        Err(refusal(text))
    }
}

fn refusal(text: &str) -> String {
    format!(
        "LAMPYRIS_LOG is {text:?}: say error, warn, info, debug, trace or off, and another level \
         for a module if need be, for example \"info\" or \"info,rpc=debug\""
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_that_is_none_is_refused_with_variable_value_and_example() {
        for good in ["info", "WARN", "off", "info,rpc=debug", "warn,chain::replica=trace"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["", " ", "debgu", "info,debgu", "info,", "rpc=debgu", "info;rpc=debug"] {
            let why = filter(bad).expect_err(bad);
            assert!(why.contains(&format!("LAMPYRIS_LOG is {bad:?}")), "{why}");
            assert!(why.contains("info,rpc=debug"), "{why}");
        }
    }
}
