//! Kubernetes quantities as the API server reads and prints them, written apart from the driver's own so that one checks the other.

use std::fmt::Write as _;

const NANO: i128 = 1_000_000_000;
const LARGEST: i128 = 9_223_372_036_854_775_807 * NANO;

/// How a quantity was written; decides how it is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notation {
    Binary,
    Decimal,
    Exponent,
}

/// A parsed quantity; compared by value.
#[derive(Debug, Clone, Copy)]
pub struct Quantity {
    nano: i128,
    notation: Notation,
}

impl Quantity {
    /// Reads a quantity. Anything finer than 1n is rounded away from zero, anything above 2^63-1 is capped, as the API server does.
    ///
    /// # Errors
    /// A text that is no quantity; the message is the server's.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong =
            || "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'".to_owned();
        let (negative, rest) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, suffix) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(wrong());
        }
        let (factor, tens, notation) = scale_of(suffix).ok_or_else(wrong)?;
        let digits = format!("{whole}{fraction}");
        let digits = digits.trim_start_matches('0');
        if digits.is_empty() {
            return Ok(Self { nano: 0, notation });
        }
        // value in nano = digits * factor * 10^(tens + 9 - fraction.len())
        let power = tens + 9 - i32::try_from(fraction.len()).map_err(|_| wrong())?;
        let magnitude = magnitude(digits, factor, power).min(LARGEST);
        Ok(Self { nano: if negative { -magnitude } else { magnitude }, notation })
    }

    /// The text that the API server returns for a text: some are kept as they came although they are not canonical.
    ///
    /// # Errors
    /// A text that is no quantity; the message is the server's.
    pub fn printed(text: &str) -> Result<String, String> {
        let read = Self::parse(text)?;
        Ok(if is_kept(text) { text.to_owned() } else { read.canonical() })
    }

    /// The value in units of 10^-9.
    #[must_use]
    pub fn nano(&self) -> i128 {
        self.nano
    }

    /// The text that the API server returns for this value.
    #[must_use]
    pub fn canonical(&self) -> String {
        if self.nano == 0 {
            return "0".to_owned();
        }
        let small = self.nano.abs() < 1024 * NANO || self.nano % NANO != 0;
        match self.notation {
            Notation::Binary if !small => print_binary(self.nano / NANO),
            Notation::Exponent => print_decimal(self.nano, true),
            Notation::Binary | Notation::Decimal => print_decimal(self.nano, false),
        }
    }
}

/// Whether a real server thinks that a text is canonical already, by a quick look.
fn is_kept(text: &str) -> bool {
    let bare = text.trim_start_matches(['+', '-']);
    let end = bare.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(bare.len());
    let (number, suffix) = bare.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole = match whole.trim_start_matches('0') {
        "" => "0",
        whole => whole,
    };
    let Some((factor, tens, notation)) = scale_of(suffix) else { return false };
    let digits = format!("{whole}{fraction}");
    let (Ok(value), Ok(length)) = (digits.parse::<i64>(), i32::try_from(digits.len())) else { return false };
    if notation == Notation::Binary {
        // What 15 decimal digits hold.
        let room = 14 - length - i32::try_from(factor.ilog2() * 3 / 10).unwrap_or(i32::MAX);
        return fraction.is_empty() && room >= 0 && value % 8 != 0;
    }
    let scale = tens - i32::try_from(fraction.len()).unwrap_or(i32::MAX);
    length <= 18 && scale >= -9 && scale % 3 == 0 && !digits.ends_with("000") && !digits.starts_with('0')
}

/// digits * factor * 10^power, rounded up, capped where it no longer fits.
fn magnitude(digits: &str, factor: i128, power: i32) -> i128 {
    if i32::try_from(digits.len()).unwrap_or(i32::MAX).saturating_add(power) > 60 {
        return LARGEST;
    }
    let kept = &digits[..digits.len().min(37)];
    let cut = digits.len() - kept.len();
    let sticky = digits[kept.len()..].bytes().any(|b| b != b'0');
    let Some(mut value) = kept.parse::<i128>().ok().and_then(|v| v.checked_mul(factor)) else { return LARGEST };
    let power = power.saturating_add(i32::try_from(cut).unwrap_or(i32::MAX));
    let mut rounded = sticky;
    for _ in 0..power.max(0) {
        let Some(next) = value.checked_mul(10) else { return LARGEST };
        value = next;
    }
    for _ in power.min(0)..0 {
        rounded |= value % 10 != 0;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    value + i128::from(rounded)
}

fn scale_of(suffix: &str) -> Option<(i128, i32, Notation)> {
    let binary = |n: u32| Some((1024_i128.pow(n), 0, Notation::Binary));
    let decimal = |tens: i32| Some((1, tens, Notation::Decimal));
    match suffix {
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let tens: i32 = exponent.parse().ok()?;
            (tens.abs() <= 1000).then_some((1, tens, Notation::Exponent))
        }
    }
}

fn print_binary(mut value: i128) -> String {
    let mut step = 0;
    while step < 6 && value % 1024 == 0 {
        value /= 1024;
        step += 1;
    }
    format!("{value}{}", ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][step])
}

fn print_decimal(nano: i128, exponent: bool) -> String {
    let mut value = nano;
    let mut tens = -9;
    while tens < 18 && value % 1000 == 0 {
        value /= 1000;
        tens += 3;
    }
    let mut text = value.to_string();
    if exponent {
        if tens != 0 {
            let _ = write!(text, "e{tens}");
        }
    } else {
        text.push_str(match tens {
            -9 => "n",
            -6 => "u",
            -3 => "m",
            3 => "k",
            6 => "M",
            9 => "G",
            12 => "T",
            15 => "P",
            18 => "E",
            _ => "",
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_come_back_canonical() {
        let table = [
            ("32768Mi", "32Gi"),
            ("32Gi", "32Gi"),
            ("10000Mi", "10000Mi"),
            ("1.5Gi", "1536Mi"),
            ("0.5Gi", "512Mi"),
            ("1024", "1024"),
            ("1000", "1k"),
            ("10000", "10k"),
            ("34359738368", "34359738368"),
            ("0", "0"),
            ("0Mi", "0"),
            ("-0", "0"),
            ("0.5", "500m"),
            ("1500m", "1500m"),
            ("2000m", "2"),
            ("1e3", "1e3"),
            ("1e4", "10e3"),
            ("1E3", "1e3"),
            ("100e-2", "1"),
            ("1E", "1E"),
            ("1Ei", "1Ei"),
            ("1Ki", "1Ki"),
            ("0.5Ki", "512"),
            ("0.1Ki", "102400m"),
            ("+5", "5"),
            ("-5", "-5"),
            ("-32768Mi", "-32Gi"),
            ("0.0000000001", "1n"),
            ("1.0000000001", "1000000001n"),
            ("10E", "9223372036854775807"),
            ("100Ei", "9223372036854775807"),
            (".5", "500m"),
            ("5.", "5"),
            ("00012Gi", "12Gi"),
        ];
        for (text, expected) in table {
            let read = Quantity::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(read.canonical(), expected, "{text}");
            assert_eq!(Quantity::parse(&read.canonical()).unwrap().nano(), read.nano(), "{text} keeps its value");
        }
    }

    #[test]
    fn some_texts_come_back_as_they_came() {
        for (text, expected) in [
            ("+5", "+5"),
            ("5.", "5."),
            ("00012Gi", "00012Gi"),
            ("20E", "20E"),
            ("00016Gi", "16Gi"),
            ("10000", "10k"),
            (".5", "500m"),
            ("1.0000000001", "1000000001n"),
            ("32768Mi", "32Gi"),
        ] {
            assert_eq!(Quantity::printed(text).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_text_that_is_no_quantity_is_refused() {
        for text in ["", "-", ".", "1GiB", "1ki", "1.2.3", "1 Gi", "e3", "1e", "0x10", "Gi", "1K", "--1", "1e1.5", "٣"]
        {
            assert!(Quantity::parse(text).is_err(), "{text:?}");
        }
    }
}
