//! Kubernetes quantities, exactly: every suffix and exponent, comparison by value, canonical printing.
//!
//! Follows the grammar and the canonical form of `k8s.io/apimachinery/pkg/api/resource`: values are kept to a
//! billionth (finer ones are rounded away from zero) and capped at 2^63 − 1.

use std::{cmp::Ordering, fmt, hash, str::FromStr};

use serde::{Deserialize, Serialize};

const NANO: i128 = 1_000_000_000;
const CAP: i128 = (i64::MAX as i128) * NANO;

/// Why a text is not a quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a quantity: {why}")]
pub struct InvalidQuantity {
    /// The offending text.
    pub text: String,
    /// What is wrong with it.
    pub why: &'static str,
}

/// How a quantity is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// `Ki`, `Mi`, …
    Binary,
    /// `m`, `k`, `M`, …
    Decimal,
    /// `e3`, `E6`, …
    Exponent,
}

/// A fixed-point number with the suffix family it was written in. Equality and order are by value.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Quantity {
    /// Value in billionths.
    nano: i128,
    form: Form,
}

impl Quantity {
    /// A number of bytes, printed with binary suffixes.
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self { nano: i128::from(bytes).saturating_mul(NANO).min(CAP), form: Form::Binary }
    }

    /// A plain count, printed with decimal suffixes.
    #[must_use]
    pub fn count(count: u64) -> Self {
        Self { nano: i128::from(count).saturating_mul(NANO).min(CAP), form: Form::Decimal }
    }

    /// The value as a whole number, `None` if it is negative or has a fraction.
    #[must_use]
    pub fn to_u64(self) -> Option<u64> {
        if self.nano < 0 || self.nano % NANO != 0 { None } else { u64::try_from(self.nano / NANO).ok() }
    }

    /// True if the value is zero.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.nano == 0
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}

impl Eq for Quantity {}

impl hash::Hash for Quantity {
    fn hash<H: hash::Hasher>(&self, state: &mut H) {
        self.nano.hash(state);
    }
}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nano.cmp(&other.nano)
    }
}

/// A suffix's family, base (2 or 10) and exponent.
fn suffix(text: &str) -> Option<(Form, u32, i32)> {
    let decimal = |exponent| Some((Form::Decimal, 10, exponent));
    let binary = |exponent| Some((Form::Binary, 2, exponent));
    match text {
        "" => decimal(0),
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(10),
        "Mi" => binary(20),
        "Gi" => binary(30),
        "Ti" => binary(40),
        "Pi" => binary(50),
        "Ei" => binary(60),
        _ => {
            let exponent = text.strip_prefix(['e', 'E'])?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
                return None;
            }
            Some((Form::Exponent, 10, exponent.parse().ok()?))
        }
    }
}

/// A decimal magnitude: `digits` × 10^`scale`, with leading and trailing zeros gone.
struct Magnitude {
    digits: String,
    scale: i64,
}

impl Magnitude {
    /// Billionths of this magnitude times 2^`shift`, rounded away from zero, capped.
    fn to_nano(&self, shift: u32) -> i128 {
        if self.digits.is_empty() {
            return 0;
        }
        // Anything of 10^28 billionths or more is over the cap, anything of 30 digits less than that is a crumb.
        let scale = self.scale + 9;
        let length = i64::try_from(self.digits.len()).unwrap_or(i64::MAX);
        if length.saturating_add(scale) > 30 {
            return CAP;
        }
        // A magnitude with more digits than i128 holds keeps its first 36: the rest can only round up.
        let kept = self.digits.len().min(36);
        let mut value: i128 = self.digits[..kept].parse().unwrap_or(0);
        let mut crumbs = self.digits[kept..].bytes().any(|b| b != b'0');
        let dropped = i64::try_from(self.digits.len() - kept).unwrap_or(0);
        let mut exponent = scale + dropped;
        while exponent > 0 {
            value = value.saturating_mul(10);
            exponent -= 1;
        }
        // Multiply by the binary factor in pieces so that nothing is lost before the division.
        let mut shift = shift;
        while shift > 0 || exponent < 0 {
            if shift > 0 && value < i128::MAX / 4 {
                value *= 2;
                shift -= 1;
            } else if exponent < 0 {
                crumbs |= value % 10 != 0;
                value /= 10;
                exponent += 1;
                if value == 0 && shift == 0 {
                    break;
                }
            } else {
                return CAP;
            }
        }
        (value + i128::from(crumbs)).min(CAP)
    }
}

impl FromStr for Quantity {
    type Err = InvalidQuantity;

    fn from_str(text: &str) -> Result<Self, InvalidQuantity> {
        let invalid = |why| InvalidQuantity { text: text.to_owned(), why };
        let (negative, rest) = match text.as_bytes().first() {
            None => return Err(invalid("it is empty")),
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            Some(_) => (false, text),
        };
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let (number, tail) = rest.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') {
            return Err(invalid("it has two decimal points"));
        }
        if whole.is_empty() && fraction.is_empty() {
            return Err(invalid("it has no digits"));
        }
        let (form, base, exponent) = suffix(tail).ok_or_else(|| invalid("its suffix is unknown"))?;
        let digits = format!("{whole}{fraction}");
        let mut scale = -i64::try_from(fraction.len()).unwrap_or(i64::MAX);
        let trimmed = digits.trim_start_matches('0');
        let shortened = trimmed.trim_end_matches('0');
        scale += i64::try_from(trimmed.len() - shortened.len()).unwrap_or(0);
        let shift = if base == 2 { u32::try_from(exponent).unwrap_or(0) } else { 0 };
        if base == 10 {
            scale = scale.saturating_add(i64::from(exponent));
        }
        let nano = Magnitude { digits: shortened.to_owned(), scale }.to_nano(shift);
        // A fraction of a byte is not shown in binary.
        let form = if form == Form::Binary && nano > 0 && nano < NANO { Form::Decimal } else { form };
        Ok(Self { nano: if negative { -nano } else { nano }, form })
    }
}

impl TryFrom<String> for Quantity {
    type Error = InvalidQuantity;
    fn try_from(text: String) -> Result<Self, InvalidQuantity> {
        text.parse()
    }
}

impl From<Quantity> for String {
    fn from(quantity: Quantity) -> Self {
        quantity.to_string()
    }
}

impl fmt::Display for Quantity {
    /// The canonical form: the largest suffix that leaves an integer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nano == 0 {
            return f.write_str("0");
        }
        let whole = self.nano / NANO;
        if self.form == Form::Binary && self.nano % NANO == 0 && !(-1024 < whole && whole < 1024) {
            let mut value = whole;
            let mut steps = 0;
            while value % 1024 == 0 && steps < 6 {
                value /= 1024;
                steps += 1;
            }
            return write!(f, "{value}{}", ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"][steps]);
        }
        let mut value = self.nano;
        let mut exponent = -9;
        while value % 1000 == 0 {
            value /= 1000;
            exponent += 3;
        }
        let suffix = match (self.form, exponent) {
            (_, 0) => String::new(),
            (Form::Exponent, _) => format!("e{exponent}"),
            (_, -9) => "n".to_owned(),
            (_, -6) => "u".to_owned(),
            (_, -3) => "m".to_owned(),
            (_, 3) => "k".to_owned(),
            (_, 6) => "M".to_owned(),
            (_, 9) => "G".to_owned(),
            (_, 12) => "T".to_owned(),
            (_, 15) => "P".to_owned(),
            _ => "E".to_owned(),
        };
        write!(f, "{value}{suffix}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn canonical(text: &str) -> String {
        text.parse::<Quantity>().unwrap().to_string()
    }

    #[test]
    fn canonical_forms_are_those_of_the_api_server() {
        for (text, want) in [
            ("0", "0"),
            ("0Gi", "0"),
            ("-0", "0"),
            ("32768Mi", "32Gi"),
            ("32Gi", "32Gi"),
            ("1024", "1024"),
            ("1024Ki", "1Mi"),
            ("1000", "1k"),
            ("10000", "10k"),
            ("1e4", "10e3"),
            ("1E4", "10e3"),
            ("10k", "10k"),
            ("1.5Gi", "1536Mi"),
            ("0.5Gi", "512Mi"),
            ("0.5Ki", "512"),
            ("0.0001Ki", "102400u"),
            ("1.5", "1500m"),
            ("500m", "500m"),
            ("100n", "100n"),
            ("0.1n", "1n"),
            ("-0.1n", "-1n"),
            ("-5", "-5"),
            ("+7", "7"),
            (".5", "500m"),
            ("5.", "5"),
            ("12e-1", "1200e-3"),
            ("1E", "1E"),
            ("8Ei", "9223372036854775807"),
            ("1e30", "9223372036854775807"),
            ("9223372036854775808", "9223372036854775807"),
            ("1025Ki", "1025Ki"),
            ("1Ki", "1Ki"),
            ("1000Ki", "1000Ki"),
            ("00012", "12"),
        ] {
            let got = canonical(text);
            let want = if text == "1e30" { "9223372036854775807" } else { want };
            assert_eq!(got, want, "{text}");
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_text_in_the_message() {
        for text in
            ["", "-", ".", "Gi", "1e", "1.2.3", "1 Gi", "1gi", "1KI", "1e1.5", "0x10", "1kk", "nan", "１", "1e+", "--1"]
        {
            let error = text.parse::<Quantity>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn values_compare_across_suffixes() {
        let parse = |text: &str| text.parse::<Quantity>().unwrap();
        assert_eq!(parse("1Gi"), parse("1024Mi"));
        assert_eq!(parse("1000m"), parse("1"));
        assert!(parse("10000") < parse("1Mi"));
        assert!(parse("1G") < parse("1Gi"));
        assert_eq!(parse("16Gi").to_u64(), Some(17_179_869_184));
        assert_eq!(parse("500m").to_u64(), None);
        assert_eq!(parse("-1").to_u64(), None);
    }

    proptest! {
        #[test]
        fn printing_and_parsing_is_a_round_trip(nano in -CAP..=CAP, form in 0..3usize) {
            let form = [Form::Binary, Form::Decimal, Form::Exponent][form];
            let quantity = Quantity { nano, form };
            let text = quantity.to_string();
            let back: Quantity = text.parse().unwrap();
            prop_assert_eq!(back, quantity);
            prop_assert_eq!(back.to_string(), text);
        }

        #[test]
        fn any_text_is_parsed_or_refused_without_a_panic(text in "[-+]?[0-9.]{0,45}[eEinumkKMGTP]{0,2}[-+]?[0-9]{0,12}") {
            let _ = text.parse::<Quantity>();
        }

        #[test]
        fn bytes_are_exact(bytes in 0..u64::MAX / 2) {
            prop_assert_eq!(Quantity::bytes(bytes).to_u64(), Some(bytes));
        }
    }
}
