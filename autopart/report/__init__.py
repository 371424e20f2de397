"""What people read: a plan, a verification, the zoo and the catalogue as text."""
