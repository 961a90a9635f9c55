//! The compiler for selectors of devices, as far as it refuses: what does not parse, names and functions that are unknown,
//! texts compared with numbers, and what is no truth. It evaluates nothing.

use super::gates::{Gate, Rules};

/// What an expression gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Type {
    Bool,
    Number,
    Text,
    /// A list, a map, a quantity …: anything that is only handed on.
    Other,
    /// Known when it is evaluated.
    Any,
}

impl Type {
    fn fits(self, other: Self) -> bool {
        self == other || self == Self::Any || other == Self::Any
    }
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Name(String),
    Text,
    Number,
    Sign(&'static str),
}

const SIGNS: [&str; 25] = [
    "&&", "||", "==", "!=", "<=", ">=", "(", ")", "[", "]", "{", "}", "<", ">", "+", "-", "*", "/", "%", "!", "?", ":",
    ",", ".", "=",
];

/// Compiles an expression.
///
/// # Errors
/// Why it is refused.
pub(crate) fn check(expression: &str, rules: &Rules) -> Result<(), String> {
    let tokens = tokens(expression)?;
    let mut parser = Parser { tokens, at: 0, rules, variables: Vec::new() };
    let kind = parser.conditional()?;
    if parser.at < parser.tokens.len() {
        return Err(parser.unexpected());
    }
    if kind.fits(Type::Bool) { Ok(()) } else { Err("must evaluate to bool or the unknown type".to_owned()) }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = if first == '"' || first == '\'' {
            let end = closing(rest, first).ok_or("Syntax error: token recognition error: a text does not end")?;
            tokens.push(Token::Text);
            end
        } else if first.is_ascii_digit() {
            let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '.')).unwrap_or(rest.len());
            tokens.push(Token::Number);
            end
        } else if first.is_ascii_alphabetic() || first == '_' {
            let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
            tokens.push(Token::Name(rest[..end].to_owned()));
            end
        } else {
            let sign = SIGNS.iter().find(|sign| rest.starts_with(**sign));
            let sign = sign.ok_or_else(|| format!("Syntax error: token recognition error at: '{first}'"))?;
            tokens.push(Token::Sign(sign));
            sign.len()
        };
        rest = rest[length..].trim_start();
    }
    Ok(tokens)
}

/// The length of a text with its quotes.
fn closing(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (index, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(index + 1),
            _ => {}
        }
    }
    None
}

struct Parser<'a> {
    tokens: Vec<Token>,
    at: usize,
    rules: &'a Rules,
    /// Names that a macro (`all`, `exists` …) binds.
    variables: Vec<String>,
}

type Parsed = Result<Type, String>;

impl Parser<'_> {
    fn unexpected(&self) -> String {
        match self.tokens.get(self.at) {
            Some(token) => format!("Syntax error: mismatched input {token:?}"),
            None => "Syntax error: mismatched input '<EOF>'".to_owned(),
        }
    }

    fn sign(&mut self, wanted: &str) -> bool {
        let found = matches!(self.tokens.get(self.at), Some(Token::Sign(sign)) if *sign == wanted);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, sign: &str) -> Result<(), String> {
        if self.sign(sign) { Ok(()) } else { Err(self.unexpected()) }
    }

    fn conditional(&mut self) -> Parsed {
        let condition = self.either()?;
        if !self.sign("?") {
            return Ok(condition);
        }
        let one = self.either()?;
        self.expect(":")?;
        let other = self.conditional()?;
        Ok(if one == other { one } else { Type::Any })
    }

    fn either(&mut self) -> Parsed {
        self.joined("||", Self::both)
    }

    fn both(&mut self) -> Parsed {
        self.joined("&&", Self::relation)
    }

    fn joined(&mut self, sign: &str, part: fn(&mut Self) -> Parsed) -> Parsed {
        let mut kind = part(self)?;
        while self.sign(sign) {
            let other = part(self)?;
            if !kind.fits(Type::Bool) || !other.fits(Type::Bool) {
                return Err(format!("found no matching overload for '_{sign}_'"));
            }
            kind = Type::Bool;
        }
        Ok(kind)
    }

    fn relation(&mut self) -> Parsed {
        let mut kind = self.sum()?;
        loop {
            let is_in = self.tokens.get(self.at) == Some(&Token::Name("in".to_owned()));
            let sign = ["==", "!=", "<=", ">=", "<", ">"].into_iter().find(|sign| self.sign(sign));
            if sign.is_none() && !is_in {
                return Ok(kind);
            }
            self.at += usize::from(is_in);
            let other = self.sum()?;
            if sign.is_some() && !kind.fits(other) {
                return Err("found no matching overload for a comparison".to_owned());
            }
            kind = Type::Bool;
        }
    }

    fn sum(&mut self) -> Parsed {
        let mut kind = self.unary()?;
        while ["+", "-", "*", "/", "%"].into_iter().any(|sign| self.sign(sign)) {
            let other = self.unary()?;
            if !kind.fits(other) || kind == Type::Bool {
                return Err("found no matching overload for an operator".to_owned());
            }
            kind = if kind == Type::Any { other } else { kind };
        }
        Ok(kind)
    }

    fn unary(&mut self) -> Parsed {
        if self.sign("!") {
            let kind = self.unary()?;
            return if kind.fits(Type::Bool) {
                Ok(Type::Bool)
            } else {
                Err("found no matching overload for '!_'".to_owned())
            };
        }
        if self.sign("-") {
            return self.unary();
        }
        self.member()
    }

    fn member(&mut self) -> Parsed {
        let is_device = self.tokens.get(self.at) == Some(&Token::Name("device".to_owned()));
        let mut kind = self.primary()?;
        let mut fresh = is_device;
        loop {
            if self.sign("[") {
                self.sign("?");
                self.conditional()?;
                self.expect("]")?;
                kind = Type::Any;
            } else if self.sign(".") {
                self.sign("?");
                let Some(Token::Name(name)) = self.tokens.get(self.at).cloned() else { return Err(self.unexpected()) };
                self.at += 1;
                kind = if self.sign("(") {
                    self.method(&name, kind)?
                } else if fresh {
                    self.field(&name)?
                } else if kind.fits(Type::Other) {
                    Type::Any
                } else {
                    return Err(format!("type does not support field selection: {name}"));
                };
            } else if fresh {
                return Ok(Type::Other);
            } else {
                return Ok(kind);
            }
            fresh = false;
        }
    }

    fn field(&self, name: &str) -> Parsed {
        match name {
            "driver" => Ok(Type::Text),
            "attributes" | "capacity" => Ok(Type::Other),
            "allowMultipleAllocations" if self.rules.has(Gate::ConsumableCapacity) => Ok(Type::Bool),
            _ => Err(format!("undefined field '{name}'")),
        }
    }

    fn method(&mut self, name: &str, of: Type) -> Parsed {
        let given = match name {
            "all" | "exists" | "exists_one" | "filter" | "map" | "bind" => {
                let Some(Token::Name(variable)) = self.tokens.get(self.at).cloned() else {
                    return Err(self.unexpected());
                };
                self.at += 1;
                self.variables.push(variable);
                self.expect(",")?;
                self.conditional()?;
                while self.sign(",") {
                    self.conditional()?;
                }
                self.expect(")")?;
                self.variables.pop();
                return Ok(if matches!(name, "filter" | "map" | "bind") { Type::Any } else { Type::Bool });
            }
            "startsWith" | "endsWith" | "contains" | "matches" | "isGreaterThan" | "isLessThan" | "isInteger"
            | "hasValue" | "includes" => Type::Bool,
            "compareTo" | "size" | "asInteger" | "indexOf" | "lastIndexOf" | "major" | "minor" | "patch" => {
                Type::Number
            }
            "lowerAscii" | "upperAscii" | "trim" | "replace" | "substring" | "join" => Type::Text,
            "orValue" | "or" | "value" | "optMap" | "split" | "find" | "findAll" | "add" | "sub" => Type::Any,
            _ => return Err(format!("undeclared reference to '{name}'")),
        };
        if of == Type::Bool {
            return Err(format!("found no matching overload for '{name}'"));
        }
        self.arguments()?;
        Ok(given)
    }

    /// What stands between brackets, up to and with the closing one.
    fn arguments(&mut self) -> Result<Vec<Type>, String> {
        let mut all = Vec::new();
        if self.sign(")") {
            return Ok(all);
        }
        loop {
            all.push(self.conditional()?);
            if !self.sign(",") {
                self.expect(")")?;
                return Ok(all);
            }
        }
    }

    fn primary(&mut self) -> Parsed {
        let Some(token) = self.tokens.get(self.at).cloned() else { return Err(self.unexpected()) };
        self.at += 1;
        match token {
            Token::Text => Ok(Type::Text),
            Token::Number => Ok(Type::Number),
            Token::Sign("(") => {
                let kind = self.conditional()?;
                self.expect(")")?;
                Ok(kind)
            }
            Token::Sign("[") => {
                while !self.sign("]") {
                    self.conditional()?;
                    self.sign(",");
                }
                Ok(Type::Other)
            }
            Token::Name(name) => self.name(&name),
            Token::Sign(_) => {
                self.at -= 1;
                Err(self.unexpected())
            }
        }
    }

    fn name(&mut self, name: &str) -> Parsed {
        if self.sign("(") {
            let kind = match name {
                "has" | "isQuantity" | "isSemver" | "bool" => Type::Bool,
                "size" | "int" | "uint" | "double" => Type::Number,
                "string" | "type" => Type::Text,
                "quantity" | "semver" | "dyn" | "duration" | "timestamp" => Type::Any,
                _ => return Err(format!("undeclared reference to '{name}'")),
            };
            self.arguments()?;
            return Ok(kind);
        }
        match name {
            "device" => Ok(Type::Other),
            "true" | "false" => Ok(Type::Bool),
            "null" | "cel" | "optional" => Ok(Type::Any),
            name if self.variables.iter().any(|variable| variable == name) => Ok(Type::Any),
            _ => Err(format!("undeclared reference to '{name}'")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::gates::Release, *};

    #[test]
    fn selectors_are_compiled() {
        let rules = Rules::of(Release::V1_36);
        for good in [
            "true",
            r#"device.driver == "npu.huawei.com" && device.attributes["npu.huawei.com"].type == "npu""#,
            r#"device.attributes["a.b"].?chipName.orValue("") == "910B4" || !(device.driver in ["a", 'b'])"#,
            r#"device.capacity["npu.huawei.com"].memCapacity.compareTo(quantity("16Gi")) >= 0"#,
            r#"has(device.attributes["a"].dies) ? device.attributes["a"].dies > 1 : false"#,
            r#"cel.bind(a, device.attributes["a.b"], a.numaNode == 6 && a.x == -1)"#,
            "device.allowMultipleAllocations == true",
        ] {
            assert_eq!(check(good, &rules), Ok(()), "{good}");
        }
        for bad in [
            "",
            "true &&",
            "true true",
            "1",
            "device",
            "device.driver",
            r#"device.driver == "npu"#,
            "device.driver == 1",
            "device.driver = 1",
            "device.name == 1",
            "npu.type == 1",
            "device.driver.isNpu()",
            r#"device.attributes["a".b == 1"#,
            "(true",
        ] {
            assert!(check(bad, &rules).is_err(), "{bad}");
        }
        let gated = "device.allowMultipleAllocations";
        assert!(check(gated, &Rules::of(Release::V1_34)).is_err());
    }
}
