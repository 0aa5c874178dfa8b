"""Small programs that use Quire as its users do."""
